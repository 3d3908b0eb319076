//! Worlds by seed: `docs/testing.md` says how many, and how to see one again.

use walrider_sim::world::{Counts, run};

#[test]
fn nothing_is_lost_and_nothing_invented() {
    let mut all = Vec::new();
    walrider_seed::rounds(100, |seed| all.push(run(seed)));
    // What never happens is not tested; a single seed that is to be seen again need not have it all.
    let sum = |of: fn(&Counts) -> u64| all.iter().map(of).sum::<u64>();
    if all.len() >= 100 {
        assert!(sum(|counts| counts.power_cuts) > 10 && sum(|counts| counts.promotions) > 10);
        assert!(sum(|counts| counts.primary_crashes) > 10 && sum(|counts| counts.timelines) > 10);
    }
}
