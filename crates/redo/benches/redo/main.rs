//! Redo of one block: the usual record types on pages as full as they usually are.
//!
//! Each operation runs on fresh copies of its page that lie in the second-level cache, as a page of a batch does.
//! `cargo bench -p walrider-redo -- --test` only checks that every case is redone.

#[path = "../../tests/hostile/drive.rs"]
mod drive;
mod heap;
mod indexes;
#[allow(dead_code, reason = "only its helpers are of use here")]
#[path = "../../tests/hostile/valid.rs"]
mod valid;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use walrider_layout::{Lsn, Major};
use walrider_redo::{Effects, Env, Outcome, Target, redo_block};
use walrider_wal::record::Record;
use walrider_wal::testing::RecordBuilder;

use drive::Case;

/// Copies of a page that are changed between two looks at the clock: 256 KB.
const PAGES: u64 = 32;
const LSN: Lsn = Lsn(0x0100_0028);
const ENV: Env = Env { major: Major::V18, hint_bits_are_logged: true };

/// Measures the block of which the record has the most data. Cases are variants of one: always the same branches would
/// cost nothing.
fn bench(criterion: &mut Criterion, cases: &[Case]) {
    let bytes: Vec<_> = cases.iter().map(Case::record).collect();
    let records: Vec<Record<'_>> = bytes.iter().map(|bytes| RecordBuilder::parse(bytes, LSN)).collect();
    let mut variants = cases.iter().zip(&records).cycle();
    criterion.bench_function(cases[0].name, |bencher| {
        bencher.iter_batched_ref(
            || {
                let (case, record) = variants.next().expect("there is one");
                let block = record.blocks.iter().max_by_key(|block| block.data.len()).expect("it has one");
                (case.page.clone(), record, block)
            },
            |(page, record, block)| {
                let mut target = Target { bytes: page, exists: true, dirty: false };
                let mut effects = Effects::default();
                let outcome = redo_block(black_box(record), black_box(block), &mut target, &ENV, &mut effects);
                assert_eq!(outcome, Ok(Outcome::NeedsRedo), "{}", cases[0].name);
                effects
            },
            BatchSize::NumIterations(PAGES),
        );
    });
}

fn all(criterion: &mut Criterion) {
    let cases = [heap::cases(), indexes::cases()].concat();
    for variants in cases.chunk_by(|a, b| a.name == b.name) {
        bench(criterion, variants);
    }
}

criterion_group!(benches, all);
criterion_main!(benches);
