//! The checksum of a page.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use walrider_layout::BLCKSZ;
use walrider_layout::checksum::page_checksum;

fn checksum(criterion: &mut Criterion) {
    let mut page = Box::new([0; BLCKSZ]);
    (0..).zip(page.iter_mut()).for_each(|(at, byte): (usize, _)| *byte = (at * 7) as u8);
    let mut group = criterion.benchmark_group("page");
    group.throughput(Throughput::Bytes(BLCKSZ as u64));
    group.bench_function("checksum", |bencher| bencher.iter(|| page_checksum(black_box(&page), black_box(7))));
}

criterion_group!(benches, checksum);
criterion_main!(benches);
