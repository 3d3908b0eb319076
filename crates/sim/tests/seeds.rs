//! Worlds by seed: `docs/testing.md` says how many, and how to see one again.

use walrider_sim::world::run;

#[test]
fn nothing_is_lost_and_nothing_invented() {
    walrider_seed::rounds(100, |seed| {
        run(seed);
    });
}
