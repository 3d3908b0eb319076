//! No room for a segment, as the operating system says it: a limit on the size of files (`EFBIG`).

use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};
use walrider_spool::{Spool, SpoolOptions};

/// Set where the limit is in force.
const LIMITED: &str = "WALRIDER_TEST_LIMITED";

/// In a process of its own: the limit is for all threads, and the signal that comes with it must be ignored.
#[test]
fn receiving_waits_for_space() {
    if std::env::var_os(LIMITED).is_some() {
        return receive();
    }
    let status = Command::new("/bin/sh")
        .args(["-c", "trap '' XFSZ; ulimit -S -f 400; exec \"$0\" --exact receiving_waits_for_space --nocapture"])
        .arg(std::env::current_exe().unwrap())
        .env(LIMITED, "1")
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}

fn receive() {
    let limit = getrlimit(Resource::Fsize);
    assert!(limit.current.is_some_and(|bytes| bytes < 1 << 20), "{limit:?}");
    let dir = tempfile::tempdir().unwrap();
    let segment_size = SegmentSize::new(1 << 20).unwrap();
    let options = SpoolOptions { directory: dir.path().to_owned(), segment_size, ..SpoolOptions::default() };
    let spool = Spool::open(options).unwrap();
    let start = Lsn(1 << 20);
    let mut writer = spool.start_at(TimelineId(1), start).unwrap();
    for _ in 0..3 {
        let error = writer.write(start, &[1; 100]).unwrap_err();
        assert!(error.is_full(), "{error}");
        assert_eq!((writer.written(), spool.written()), (start, start));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "what cannot be used does not take space");
    }
    setrlimit(Resource::Fsize, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
    writer.write(start, &[1; 100]).unwrap();
    spool.wait_flushed(Lsn(start.0 + 100)).unwrap();
    assert_eq!(
        std::fs::read(dir.path().join("000000010000000000000001")).unwrap()[..101],
        [[1; 100].as_slice(), &[0]].concat()
    );
}
