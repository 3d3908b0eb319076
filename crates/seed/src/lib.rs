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

/// Numbers that look random, and are the same for the same seed (SplitMix64).
pub struct Random(pub u64);

impl Random {
    /// From [`seed`].
    pub fn printed() -> Random {
        Random(seed())
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// One of so many: less than `bound`, or zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound.max(1)
    }

    /// The same, for an index.
    pub fn index(&mut self, bound: usize) -> usize {
        self.below(bound as u64) as usize
    }

    /// True once in so many times.
    pub fn one_in(&mut self, bound: u64) -> bool {
        self.below(bound) == 0
    }

    /// [`Random::below`], for code that ships and does not know this crate.
    pub fn draws(&mut self) -> impl FnMut(u64) -> u64 {
        |bound| self.below(bound)
    }

    /// One of the cases, with a few of its bytes changed; `telling` are bytes that mean something where they stand.
    pub fn spoiled(&mut self, cases: &[Vec<u8>], telling: &[u8]) -> Vec<u8> {
        let mut bytes = cases[self.index(cases.len())].clone();
        for _ in 0..=self.below(4) {
            let at = self.index(bytes.len());
            match self.below(6) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, self.number() as u8),
                2 => bytes.extend_from_slice(&cases[self.index(cases.len())]),
                3 if !bytes.is_empty() => bytes[at] = [0, 1, 4, 0x7f, 0x80, 0xff][self.index(6)],
                4 if !bytes.is_empty() => bytes[at] = telling[self.index(telling.len())],
                _ if !bytes.is_empty() => bytes[at] = self.number() as u8,
                _ => bytes.push(self.number() as u8),
            }
        }
        bytes
    }
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
