//! What the system knows of this process, under the names that the client libraries of Prometheus have for it
//! (`process_*`; "Standard and runtime collectors" in its guide for writers of such libraries).

use std::fmt::Write;
use std::fs;

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};

/// Appends the metrics. What the system does not tell has no sample.
pub fn render(text: &mut String) {
    let mut one = |name: &str, kind: &str, help: &str, value: Option<f64>| {
        let Some(value) = value else { return };
        writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}").expect("a string takes all");
    };
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let seconds = |ticks: u64| ticks as f64 / clock_ticks_per_second() as f64;
    let cpu = number(&stat, UTIME).zip(number(&stat, STIME));
    one(
        "process_cpu_seconds_total",
        "counter",
        "Total user and system CPU time spent in seconds.",
        cpu.map(|(user, system)| seconds(user + system)),
    );
    one(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process since unix epoch in seconds.",
        number(&stat, START_TIME).zip(boot_time()).map(|(since_boot, boot)| boot as f64 + seconds(since_boot)),
    );
    let memory = number(&stat, VSIZE).zip(number(&stat, RSS));
    let (virtual_bytes, resident_pages) = memory.unzip();
    one(
        "process_virtual_memory_bytes",
        "gauge",
        "Virtual memory size in bytes.",
        virtual_bytes.map(|bytes| bytes as f64),
    );
    one(
        "process_resident_memory_bytes",
        "gauge",
        "Resident memory size in bytes.",
        resident_pages.map(|pages| pages as f64 * page_size() as f64),
    );
    // Without the descriptor that counts them.
    let open = fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count().saturating_sub(1) as f64);
    one("process_open_fds", "gauge", "Number of open file descriptors.", open);
    let limit = getrlimit(Resource::Nofile).current;
    one("process_max_fds", "gauge", "Maximum number of open file descriptors.", limit.map(|limit| limit as f64));
}

// Fields of /proc/PID/stat, as proc_pid_stat(5) numbers them.
const UTIME: usize = 14;
const STIME: usize = 15;
const START_TIME: usize = 22;
const VSIZE: usize = 23;
const RSS: usize = 24;

/// A number of `/proc/self/stat`. The second field, the program's name in parentheses, may hold anything.
fn number(stat: &str, field: usize) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(field.checked_sub(3)?)?.parse().ok()
}

/// When the machine started, in seconds since 1970.
fn boot_time() -> Option<u64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn fields_of_stat() {
        let stat = "7 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 140 150 16 17 18 19 20 21 220 230 240 25";
        assert_eq!(
            [UTIME, STIME, START_TIME, VSIZE, RSS].map(|field| number(stat, field)),
            [140, 150, 220, 230, 240].map(Some)
        );
        assert_eq!((number("", RSS), number("7 (a) S 1", RSS)), (None, None));
    }

    #[test]
    fn of_this_process() {
        let mut text = String::new();
        render(&mut text);
        let value = |name: &str| -> f64 {
            let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
            line.unwrap_or_else(|| panic!("{name} in\n{text}")).parse().unwrap()
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
        assert!((0.0..600.0).contains(&(now - value("process_start_time_seconds"))), "{text}");
        assert!(value("process_cpu_seconds_total") >= 0.0);
        assert!(value("process_virtual_memory_bytes") >= value("process_resident_memory_bytes"));
        assert!(value("process_resident_memory_bytes") > 1e5, "{text}");
        let before = value("process_open_fds");
        assert!(before >= 3.0 && value("process_max_fds") >= before, "{text}");
    }
}
