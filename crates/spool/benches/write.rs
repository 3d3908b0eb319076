//! Appending small messages, as a primary with short transactions sends them, while another thread flushes.

use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use walrider_layout::{Lsn, TimelineId};
use walrider_spool::{Spool, SpoolOptions, Writer};

/// A spool in a directory of its own, which keeps a few segments only.
struct Bench {
    spool: Arc<Spool>,
    writer: Writer,
    removed: Lsn,
}

impl Bench {
    fn write(&mut self, bytes: &[u8]) {
        let at = self.writer.written();
        self.writer.write(at, bytes).expect("there is space");
        if at.0 - self.removed.0 > 64 << 20 {
            self.removed = at;
            self.spool.remove_before(at, TimelineId(1)).expect("files can be removed");
        }
    }
}

fn write(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("write");
    for message in [150, 8_192, 131_072] {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let options =
            SpoolOptions { directory: directory.path().to_owned(), max_recycled: 4, ..SpoolOptions::default() };
        let spool = Spool::open(options).expect("a spool");
        let removed = Lsn(1 << 24);
        let writer = spool.start_at(TimelineId(1), removed).expect("the only writer");
        let mut bench = Bench { spool, writer, removed };
        let bytes = vec![7; message];
        group.throughput(Throughput::Bytes(message as u64));
        group.bench_function(BenchmarkId::from_parameter(message), |bencher| bencher.iter(|| bench.write(&bytes)));
    }
}

criterion_group!(benches, write);
criterion_main!(benches);
