//! The process's memory: how much it has, and what becomes of what is freed.

use std::fs;

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
