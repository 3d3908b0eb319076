//! Where tests take random choices from, in all crates alike; `docs/testing.md` says what `WALRIDER_SEED` may be. The tests in
//! Python read it in `tests/lab/seed.py`.

use std::time::{Duration, Instant, SystemTime};

/// The seed where none is named: `make test` tries the same every time.
pub const FIXED: u64 = 1;

/// The seed, printed so that a failure tells it: `WALRIDER_SEED`, of this moment where that is `random`, or [`FIXED`].
///
/// # Panics
///
/// If `WALRIDER_SEED` is neither a number nor `random`.
pub fn seed() -> u64 {
    let wanted = std::env::var("WALRIDER_SEED").unwrap_or_default();
    let seed = parse(&wanted).unwrap_or_else(|| panic!("WALRIDER_SEED={wanted}: neither a number nor \"random\""));
    println!("WALRIDER_SEED={seed}");
    seed
}

fn parse(wanted: &str) -> Option<u64> {
    match wanted {
        "" => Some(FIXED),
        "random" => SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok().map(|since| since.as_nanos() as u64),
        number => number.parse().ok(),
    }
}

/// Runs rounds, each from a seed of its own, counted up from [`seed`]: `count` of them, or for as long as
/// `WALRIDER_FUZZ_SECONDS` says. A round that panics says how to see it at once.
///
/// # Panics
///
/// If a round does, or takes 60 seconds.
pub fn rounds(count: u64, mut round: impl FnMut(u64)) {
    let seconds = std::env::var("WALRIDER_FUZZ_SECONDS").ok();
    let time = seconds.map(|seconds| Duration::from_secs(seconds.parse().expect("WALRIDER_FUZZ_SECONDS, a number")));
    let (first, begun) = (seed(), Instant::now());
    let mut done = 0;
    while time.map_or(done < count, |time| done == 0 || begun.elapsed() < time) {
        let told = Told(first.wrapping_add(done));
        let begun = Instant::now();
        round(told.0);
        assert!(begun.elapsed() < Duration::from_secs(60), "one round took {:?}", begun.elapsed());
        done += 1;
    }
    println!("{done} rounds");
}

/// Tells which round a panic came from.
struct Told(u64);

impl Drop for Told {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed: WALRIDER_SEED={} shows it at once", self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_fixed_given_or_of_this_moment() {
        assert_eq!((parse(""), parse("7"), parse("-7"), parse("Random")), (Some(FIXED), Some(7), None, None));
        assert_ne!(parse("random"), parse("random"));
    }

    #[test]
    fn rounds_count_up() {
        let mut seeds = Vec::new();
        rounds(3, |seed| seeds.push(seed));
        assert!(seeds.is_sorted_by(|a, b| a + 1 == *b) && !seeds.is_empty());
    }
}
