//! What the system says of a process on this host (`proc_pid_stat(5)`, `proc_pid_io(5)`).

use std::fs;
use std::path::{Path, PathBuf};

use rustix::param::clock_ticks_per_second;

use crate::sample::Process;

/// The process of this id, if it is one of a PostgreSQL server and says in its title what `role` it has.
pub fn process(pid: u32, role: &str) -> Option<Process> {
    let title = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let title = String::from_utf8_lossy(&title);
    if !title.starts_with("postgres") || !title.contains(role) {
        // Ids of another host, or of another container.
        return None;
    }
    let stat = parse_stat(pid, &stat(pid)?)?;
    let io = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    let counter = |key: &str| io.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(": ")?.parse().ok());
    Some(Process {
        read_bytes: counter("read_bytes"),
        write_bytes: counter("write_bytes"),
        read_calls: counter("syscr"),
        write_calls: counter("syscw"),
        ..stat
    })
}

/// Whether a process of this name runs.
pub fn runs(name: &str) -> bool {
    let is =
        |entry: fs::DirEntry| fs::read_to_string(entry.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name);
    fs::read_dir("/proc").is_ok_and(|entries| entries.flatten().any(is))
}

/// The parent of the process of this id, if that is a PostgreSQL server's: of a session's process, the postmaster.
pub fn parent(pid: u32) -> Option<u32> {
    fs::read(format!("/proc/{pid}/cmdline")).ok().filter(|title| title.starts_with(b"postgres"))?;
    Stat(&stat(pid)?).field(4)?.parse().ok()
}

/// The processes that this one started and that are there.
pub fn children(pid: u32) -> Vec<u32> {
    // Each thread has those that it started.
    let of = |thread: &PathBuf| fs::read_to_string(thread.join("children")).unwrap_or_default();
    let pids = threads(pid).iter().map(of).collect::<Vec<_>>().concat();
    pids.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// The directories of its threads.
fn threads(pid: u32) -> Vec<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{pid}/task"));
    entries.map_or_else(|_| Vec::new(), |entries| entries.flatten().map(|entry| entry.path()).collect())
}

/// Processor time of a process, of its children that are there, and of those that were, in seconds, in steps of a hundredth: of a
/// postmaster, of the whole server.
pub fn tree_seconds(pid: u32) -> Option<f64> {
    let of = |pid| {
        let stat = stat(pid)?;
        [14, 15, 16, 17].into_iter().map(|number| Stat(&stat).seconds(number)).sum::<Option<f64>>()
    };
    // One that ends between the two is counted twice rather than not at all.
    let living: f64 = children(pid).into_iter().filter_map(of).sum();
    Some(living + of(pid)?)
}

/// Processor time, and time spent waiting for disks, of those threads of a process that bear its own name, in seconds: of `walrider
/// standby` those that replay, because all others have names.
pub fn unnamed_threads_seconds(pid: u32) -> Option<f64> {
    let name = |dir: &Path| fs::read_to_string(dir.join("comm")).ok();
    let of_process = name(Path::new(&format!("/proc/{pid}")))?;
    let threads = threads(pid).into_iter().filter(|thread| name(thread).as_ref() == Some(&of_process));
    let seconds = threads.filter_map(|thread| {
        let stat = fs::read_to_string(thread.join("stat")).ok()?;
        [14, 15, 42].into_iter().map(|number| Stat(&stat).seconds(number)).sum::<Option<f64>>()
    });
    Some(seconds.sum())
}

fn stat(pid: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/stat")).ok()
}

/// A line of `/proc/PID/stat`.
struct Stat<'a>(&'a str);

impl Stat<'_> {
    /// As the manual numbers them, from the third on. The second, the program's name in parentheses, may hold anything.
    fn field(&self, number: usize) -> Option<&str> {
        self.0.rsplit_once(')')?.1.split_ascii_whitespace().nth(number - 3)
    }

    fn seconds(&self, number: usize) -> Option<f64> {
        self.field(number)?.parse::<u64>().ok().map(|ticks| ticks as f64 / clock_ticks_per_second() as f64)
    }
}

fn parse_stat(pid: u32, stat: &str) -> Option<Process> {
    let stat = Stat(stat);
    Some(Process {
        pid,
        state: stat.field(3)?.chars().next()?,
        user_seconds: stat.seconds(14)?,
        system_seconds: stat.seconds(15)?,
        block_io_seconds: stat.seconds(42).unwrap_or(0.0),
        ..Process::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_stat_is_read_whatever_the_name_is() {
        let rest = "R 1 1 1 0 -1 4194304 1 2 3 4 250 50 0 0 20 0 1 0 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 17 1 0 0 100 0 0";
        let process = parse_stat(7, &format!("7 (a) b (c)) {rest}")).unwrap();
        let tick = clock_ticks_per_second() as f64;
        assert_eq!((process.pid, process.state), (7, 'R'));
        assert_eq!((process.user_seconds, process.system_seconds), (250.0 / tick, 50.0 / tick));
        assert_eq!(process.block_io_seconds, 100.0 / tick);
        assert_eq!(parse_stat(7, "7 (a"), None);
        assert_eq!(parse_stat(7, "7 (a) R 1"), None);
    }

    #[test]
    fn what_is_no_server_is_none_of_ours() {
        assert_eq!(process(std::process::id(), "startup"), None);
        assert_eq!(process(u32::MAX, "startup"), None);
        assert_eq!((parent(std::process::id()), parent(u32::MAX), tree_seconds(u32::MAX)), (None, None, None));
    }

    /// The time of a thread counts if it has no name of its own.
    #[test]
    fn threads_with_names_are_left_out() {
        let me = std::process::id();
        // The names of tests' threads are those of tests: so is none of them the process's but the main one, which waits.
        let before = unnamed_threads_seconds(me).unwrap();
        let burn = move || {
            let used = || Stat(&fs::read_to_string("/proc/thread-self/stat").unwrap()).seconds(14).unwrap();
            while used() < 0.06 {
                (0..100_000).for_each(|number| _ = std::hint::black_box(number));
            }
            unnamed_threads_seconds(me).unwrap()
        };
        let named = std::thread::Builder::new().name("other".to_owned()).spawn(burn).unwrap().join().unwrap();
        let name = fs::read_to_string(format!("/proc/{me}/comm")).unwrap();
        let same = std::thread::Builder::new().name(name.trim_end().to_owned()).spawn(burn).unwrap().join().unwrap();
        assert!(named - before < 0.02, "{before} {named}");
        assert!(same - named > 0.02, "{named} {same}");
        assert_eq!(unnamed_threads_seconds(u32::MAX), None);
    }

    /// A child's time counts while it is there, and when it has ended.
    #[test]
    fn time_of_children_counts() {
        let me = std::process::id();
        let burn = "i=0; while [ $i -lt 200000 ]; do i=$((i + 1)); done; echo; read x";
        let mut child = std::process::Command::new("sh");
        let (stdin, stdout) = (std::process::Stdio::piped(), std::process::Stdio::piped());
        let mut child = child.args(["-c", burn]).stdin(stdin).stdout(stdout).spawn().unwrap();
        let mut line = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        assert!(children(me).contains(&child.id()));
        let of_child = tree_seconds(child.id()).unwrap();
        assert!(of_child >= 0.02, "{of_child}");
        assert!(tree_seconds(me).unwrap() >= of_child);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(tree_seconds(me).unwrap() >= of_child);
    }
}
