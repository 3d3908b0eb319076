//! Records and pages that make no sense, or nearly do: redo answers with an error or goes through, but never
//! panics, reads or writes out of bounds, or runs on for ever.
//!
//! Each test prints its seed; `WALRIDER_SEED` sets it, `WALRIDER_FUZZ_SECONDS` how long each of them runs.
//! The same inputs, driven by coverage, are under `fuzz/`.

mod drive;
mod valid;
mod valid_brin;
mod valid_gin;
mod valid_gist;
mod valid_hash;
mod valid_spgist;

use drive::Case;
use walrider_seed::Random;

/// A second or two of each test.
const ROUNDS: u64 = 5_000;

/// Runs so many rounds, each from a seed of its own.
fn rounds(count: u64, mut round: impl FnMut(&mut Random)) {
    walrider_seed::rounds(count, |seed| round(&mut Random(seed)));
}

fn noise(random: &mut Random, len: usize) -> Vec<u8> {
    (0..len).map(|_| random.number() as u8).collect()
}

#[test]
fn structured_noise() {
    rounds(ROUNDS, |random| {
        let len = 40 + random.index(600);
        drive::redo(&noise(random, len));
    });
}

#[test]
fn bytes_that_are_no_record() {
    rounds(ROUNDS, |random| {
        let len = random.index(300);
        let mut bytes = noise(random, len);
        // Past the total length, which everything else hangs on.
        if bytes.len() >= 24 {
            bytes[..4].copy_from_slice(&(len as u32).to_le_bytes());
            let id = random.index(40) as u8;
            if let Some(first) = bytes.get_mut(24) {
                *first = [id, 0, 255, 254, 253][random.index(5)];
            }
        }
        drive::record(&bytes);
        let len = random.index(9000);
        drive::image(&noise(random, len));
    });
}

#[test]
fn valid_records_with_some_bytes_changed() {
    let cases = [
        valid::cases(),
        valid_brin::cases(),
        valid_gin::cases(),
        valid_gist::cases(),
        valid_hash::cases(),
        valid_spgist::cases(),
    ]
    .concat();
    for case in &cases {
        for (id, result) in case.run() {
            assert!(result.is_ok(), "{} block {id}: {result:?}", case.name);
        }
    }
    rounds(ROUNDS, |random| {
        let mut case = cases[random.index(cases.len())].clone();
        for _ in 0..=random.index(3) {
            mutate(&mut case, random);
        }
        case.run();
    });
}

/// Changes one thing about a case.
fn mutate(case: &mut Case, random: &mut Random) {
    let interesting = [0, 1, 2, 7, 8, 23, 24, 255, 291, 292, 2041, 2047, 4095, 8168, 8191, 8192, 0x7FFF, 0xFFFF];
    let which = random.index(6);
    let block = random.index(case.blocks.len());
    if which == 0 {
        case.info = case.info.wrapping_add((random.index(16) as u8) << 4);
        return;
    }
    let header_or_special = if random.index(2) == 0 { random.index(48) } else { 8192 - 1 - random.index(24) };
    let bytes: &mut [u8] = match which {
        1 => &mut case.main,
        2 | 3 => &mut case.blocks[block].data,
        _ => &mut case.page[..],
    };
    let at = match which {
        4 => header_or_special,
        _ => random.index(bytes.len()),
    };
    match random.index(4) {
        0 => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << random.index(8)),
        1 => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte = random.number() as u8),
        2 => {
            let value: u16 = interesting[random.index(interesting.len())];
            bytes.iter_mut().skip(at).zip(value.to_le_bytes()).for_each(|(byte, new)| *byte = new);
        }
        _ => {
            let data = if which == 1 { &mut case.main } else { &mut case.blocks[block].data };
            let len = random.index(data.len() + 12);
            data.resize(len, random.number() as u8);
        }
    }
}
