//! Maps by what is a hash already.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

/// By a hash, which is not hashed once more, as `HashMap` does to be safe where somebody else chooses keys: one multiplication by a number
/// that nobody knows is enough to spread them.
pub type Hashed<V> = HashMap<u64, V, Spread>;

/// Multiplies.
#[derive(Clone, Copy, Debug)]
pub struct Spread(u64);

impl Spread {
    /// With a number of its own.
    pub fn new() -> Spread {
        Spread(RandomState::new().hash_one(0) | 1)
    }
}

impl Default for Spread {
    fn default() -> Spread {
        Spread::new()
    }
}

impl BuildHasher for Spread {
    type Hasher = Spread;

    fn build_hasher(&self) -> Spread {
        *self
    }
}

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.0) * u128::from(word);
        self.0 = (product as u64) ^ (product >> 64) as u64;
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers")
    }
}
