//! The process's memory: how much it has and may have, and what becomes of what is freed.

use std::fs;
use std::path::Path;

/// Blocks of so many bytes are asked of the system, and given back to it, each by itself: what is put apart of a batch gathers in such
/// blocks.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LARGE: libc::c_int = 128 << 10;

/// Has large blocks go back to the system when they are freed. Left alone, the C library raises its threshold with the first that it frees, up to
/// 32 MB, and keeps what is freed below that among what is in use: a restore held 306 MB for the 195 that it used.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[allow(unsafe_code)]
    // SAFETY: the call takes numbers only, and no other thread has been started. Where it fails, all is as before.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
    }
}

/// Has freed memory that lies among what is in use go back to the system. Without that, a replay with `--memory 256MB` held 82 MB that nobody
/// used, while it passed over the pages of a batch that had been put apart.
pub(crate) fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[allow(unsafe_code)]
    // SAFETY: the call takes a number only, and takes the allocator's locks itself.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Bytes of memory that the process has now (`/proc/self/statm`, proc(5)); `None` where the system does not say.
pub(crate) fn resident() -> Option<u64> {
    let pages = fs::read_to_string("/proc/self/statm").ok()?.split(' ').nth(1)?.parse::<u64>().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// Bytes of memory that the process may have: the machine's, or less where a control group that it is in, or one around that, allows less; `None`
/// where the system does not say (`/proc/meminfo`, proc(5); cgroups(7)).
pub fn limit() -> Option<u64> {
    limit_in(Path::new("/"))
}

fn limit_in(root: &Path) -> Option<u64> {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let info = read("proc/meminfo");
    let total = info
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let mut least = total.map(|kilobytes| kilobytes << 10);
    for line in read("proc/self/cgroup").lines() {
        // Its number, the controllers, the path of the group; version 2 names no controllers.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (mount, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        // A container may see its own group in the place of the root alone.
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let limit = fs::read_to_string(root.join(mount).join(group).join(file));
            // Without a limit, this says "max", or more than anybody has.
            let limit = limit.ok().and_then(|text| text.trim().parse().ok());
            least = least.into_iter().chain(limit).min();
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        limit_in(root.path())
    }

    const MACHINE: (&str, &str) = ("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:         8000000 kB\n");

    #[test]
    fn the_tightest_group_counts() {
        assert_eq!(system(&[]), None);
        assert_eq!(system(&[MACHINE]), Some(16 << 30));
        let own = ("proc/self/cgroup", "0::/system.slice/walrider.service\n");
        let unlimited = ("sys/fs/cgroup/system.slice/walrider.service/memory.max", "max\n");
        let around = ("sys/fs/cgroup/system.slice/memory.max", "4294967296\n");
        assert_eq!(system(&[MACHINE, own]), Some(16 << 30));
        assert_eq!(system(&[MACHINE, own, unlimited, around]), Some(4 << 30));
        let more = ("sys/fs/cgroup/system.slice/memory.max", "42949672960\n");
        assert_eq!(system(&[MACHINE, own, unlimited, more]), Some(16 << 30));
    }

    /// Version 1, in a container that sees its own group alone.
    #[test]
    fn a_container_sees_its_group_at_the_root() {
        let own = ("proc/self/cgroup", "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n1:name=systemd:/docker/1\n0::/\n");
        let root = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n");
        let other = ("sys/fs/cgroup/cpu,cpuacct/memory.limit_in_bytes", "1\n");
        assert_eq!(system(&[MACHINE, own, root, other]), Some(2 << 30));
        let none = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(system(&[MACHINE, own, none]), Some(16 << 30));
    }
}
