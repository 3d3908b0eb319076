//! What the system says of a process on this host (`proc_pid_stat(5)`, `proc_pid_io(5)`).

use std::fs;

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
    let stat = parse_stat(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
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

/// The second field, the program's name in parentheses, may hold anything.
fn parse_stat(pid: u32, stat: &str) -> Option<Process> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    // As the manual numbers them, from the third on.
    let field = |number: usize| fields.get(number - 3).copied();
    let seconds =
        |number| field(number)?.parse::<u64>().ok().map(|ticks| ticks as f64 / clock_ticks_per_second() as f64);
    Some(Process {
        pid,
        state: field(3)?.chars().next()?,
        user_seconds: seconds(14)?,
        system_seconds: seconds(15)?,
        block_io_seconds: seconds(42).unwrap_or(0.0),
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
    }
}
