//! Which combinations of levels are tried: all of them, or a fraction that still tells the factors apart.
//!
//! Where all factors have two levels, and the fraction is a half, a quarter, ..., it is a regular one: the last factors are products of
//! others, so that what each main effect is mixed with is known exactly (D. C. Montgomery, "Design and Analysis of Experiments",
//! chapter 8). Else it is a random choice, the best of many.

use crate::effects::Model;
use crate::plan::Factor;

/// How many random choices are compared.
const TRIES: usize = 500;
/// Most sets of generators that are compared.
const MAX_SETS: usize = 200_000;

/// The combinations that are tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Design {
    /// For each factor the number of its level.
    pub combinations: Vec<Vec<usize>>,
    /// What they cannot tell apart, a sentence each; none where all combinations are tried.
    pub limits: Vec<String>,
}

/// One of `denominator` combinations; the seed is for a random choice.
///
/// # Errors
/// So few combinations cannot tell the factors apart.
pub fn design(factors: &[Factor], denominator: u32, seed: u64) -> Result<Design, String> {
    let varied: Vec<usize> = (0..factors.len()).filter(|&at| factors[at].levels.len() > 1).collect();
    let names: Vec<&str> = varied.iter().map(|&at| factors[at].name.as_str()).collect();
    if denominator <= 1 {
        return Ok(Design { combinations: all(factors), limits: Vec::new() });
    }
    if denominator.is_power_of_two() && varied.iter().all(|&at| factors[at].levels.len() == 2) {
        let generated = denominator.ilog2() as usize;
        let (levels, limits) = regular(&names, generated)?;
        let combinations = levels.into_iter().map(|bits| {
            let mut combination = vec![0; factors.len()];
            varied.iter().enumerate().for_each(|(bit, &at)| combination[at] = (bits >> bit & 1) as usize);
            combination
        });
        return Ok(Design { combinations: combinations.collect(), limits });
    }
    chosen(factors, denominator, seed)
}

/// All combinations, the last factor changing fastest.
fn all(factors: &[Factor]) -> Vec<Vec<usize>> {
    factors.iter().fold(vec![Vec::new()], |before, factor| {
        let longer = |levels: Vec<usize>| (0..factor.levels.len()).map(move |level| [&levels[..], &[level]].concat());
        before.into_iter().flat_map(longer).collect()
    })
}

/// Levels of a regular fraction of two-level factors as bits, the last `generated` of them products of others; of all choices one of
/// minimum aberration: as few short words in the defining relation as can be.
fn regular(names: &[&str], generated: usize) -> Result<(Vec<u32>, Vec<String>), String> {
    let too_small = || format!("a fraction of 1/{} cannot tell {} factors apart", 1_u64 << generated, names.len());
    let free = names.len().checked_sub(generated).filter(|&free| free >= 2).ok_or_else(too_small)?;
    let products: Vec<u32> = (1..1_u32 << free).filter(|word| word.count_ones() >= 2).collect();
    // How many words there are of each length, and the generators.
    let mut best: Option<(Vec<usize>, Vec<u32>)> = None;
    let mut looked = 0;
    choose(&products, generated, &mut Vec::new(), &mut |set| {
        looked += 1;
        let words: Vec<u32> = set.iter().enumerate().map(|(nth, word)| word | 1 << (free + nth)).collect();
        let mut lengths = vec![0; names.len() + 1];
        relation(&words).iter().for_each(|word| lengths[word.count_ones() as usize] += 1);
        if best.as_ref().is_none_or(|(least, _)| lengths < *least) {
            best = Some((lengths, words));
        }
        looked < MAX_SETS
    });
    if looked >= MAX_SETS {
        return Err(format!("{} factors are too many for a fraction of 1/{}", names.len(), 1_u64 << generated));
    }
    let (_, words) = best.ok_or_else(too_small)?;
    let levels = (0..1_u32 << free).map(|bits| {
        // High is +1, low is -1: a product is high where an even number of its factors is low.
        let is_high = |word: u32| (word & !bits & ((1 << free) - 1)).count_ones().is_multiple_of(2) as u32;
        words.iter().enumerate().fold(bits, |bits, (nth, &word)| bits | is_high(word) << (free + nth))
    });
    Ok((levels.collect(), aliases(names, &relation(&words))))
}

/// All sets of so many, until one is not wanted to be followed by others; whether that was not so.
fn choose(from: &[u32], count: usize, set: &mut Vec<u32>, found: &mut dyn FnMut(&[u32]) -> bool) -> bool {
    if count == 0 {
        return found(set);
    }
    (0..from.len()).all(|at| {
        set.push(from[at]);
        let goes_on = choose(&from[at + 1..], count - 1, set, found);
        set.pop();
        goes_on
    })
}

/// The defining relation: all products of words, with a bit for each factor.
fn relation(words: &[u32]) -> Vec<u32> {
    let product =
        |subset: u32| (0..words.len()).filter(|at| subset >> at & 1 == 1).fold(0, |word, at| word ^ words[at]);
    (1..1_u32 << words.len()).map(product).collect()
}

/// What the main effects are mixed with, in words.
fn aliases(names: &[&str], relation: &[u32]) -> Vec<String> {
    let product = |word: u32| {
        let names: Vec<&str> = (0..names.len()).filter(|at| word >> at & 1 == 1).map(|at| names[at]).collect();
        names.join(" × ")
    };
    let mut words = relation.to_vec();
    words.sort_by_key(|word| (word.count_ones(), *word));
    let shortest = words.first().map_or(0, |word| word.count_ones());
    let shown: Vec<String> = words.iter().map(|&word| product(word)).collect();
    let mut limits = vec![format!(
        "A regular fraction of resolution {shortest}: these products are constant: {}.",
        shown.join(", ")
    )];
    for (at, name) in names.iter().enumerate() {
        let mixed = words.iter().filter(|&&word| word.count_ones() == 3 && word >> at & 1 == 1);
        let mixed: Vec<String> = mixed.map(|word| product(word & !(1 << at))).collect();
        if !mixed.is_empty() {
            limits
                .push(format!("The effect of {name} cannot be told from that of {} together.", mixed.join(", or of ")));
        }
    }
    if shortest > 3 {
        limits.push("No main effect is mixed with what two factors do together.".to_owned());
    }
    limits
}

/// The best of many random choices: that which tells the effects apart most sharply, which is a balanced one where that can be.
fn chosen(factors: &[Factor], denominator: u32, seed: u64) -> Result<Design, String> {
    let mut everything = all(factors);
    let count = everything.len().div_ceil(denominator as usize);
    let needed = 1 + factors.iter().map(|factor| factor.levels.len() - 1).sum::<usize>();
    if count < needed {
        let total = everything.len();
        return Err(format!(
            "1/{denominator} of {total} combinations is {count}; the levels need {needed} at least to be told apart"
        ));
    }
    let mut random = fastrand::Rng::with_seed(seed);
    let mut best: Option<(f64, Vec<Vec<usize>>)> = None;
    for _ in 0..TRIES {
        random.shuffle(&mut everything);
        let sharpness = Model::new(factors, &everything[..count]).sharpness();
        if let Some(sharpness) = sharpness.filter(|sharpness| best.as_ref().is_none_or(|(most, _)| sharpness > most)) {
            best = Some((sharpness, everything[..count].to_vec()));
        }
    }
    let (_, mut combinations) = best.ok_or("no fraction of that size was found that tells the levels apart")?;
    combinations.sort();
    let mut limits = vec![format!(
        "{count} of {} combinations, chosen at random: what two factors do together adds to their own effects, and cannot be told from them.",
        everything.len()
    )];
    if let Some((one, other, correlation)) = Model::new(factors, &combinations).most_alike() {
        limits.push(format!("Of the levels, {one} and {other} are told apart worst (correlation {correlation:.2})."));
    }
    Ok(Design { combinations, limits })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::plan;

    fn design(factors: &[&str], denominator: u32) -> Result<Design, String> {
        plan(factors, denominator, 1).design()
    }

    /// The principal half of 2^3 with C = AB: c, a, b, abc (Montgomery, table 8.1).
    #[test]
    fn the_half_of_three_factors() {
        let design = design(&["a=-,+", "b=-,+", "fixed=1", "c=-,+"], 2).unwrap();
        assert_eq!(design.combinations, [[0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 1]]);
        assert_eq!(
            design.limits,
            [
                "A regular fraction of resolution 3: these products are constant: a × b × c.",
                "The effect of a cannot be told from that of b × c together.",
                "The effect of b cannot be told from that of a × c together.",
                "The effect of c cannot be told from that of a × b together.",
            ]
        );
    }

    /// The resolutions of the best fractions (Montgomery, table 8.14): 2^(4-1) IV, 2^(5-1) V, 2^(5-2) III, 2^(6-2) IV, 2^(7-3) IV,
    /// 2^(7-4) III, 2^(8-4) IV; with minimum aberration 2^(7-2) has one word of four letters and two of five.
    #[test]
    fn the_fraction_is_the_best_there_is() {
        for (factors, generated, resolution) in
            [(4, 1, 4), (5, 1, 5), (5, 2, 3), (6, 2, 4), (7, 3, 4), (7, 4, 3), (8, 4, 4)]
        {
            let names: Vec<String> = (0..factors).map(|nth| format!("f{nth}=0,1")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let design = design(&names, 1 << generated).unwrap();
            let said = format!("of resolution {resolution}:");
            assert!(design.limits[0].contains(&said), "2^({factors}-{generated}): {}", design.limits[0]);
            assert_eq!(design.limits.last().unwrap().starts_with("No main effect"), resolution > 3);
            // Each factor is high in half of the runs, and independent of each other.
            let count = design.combinations.len();
            assert_eq!(count, 1 << (factors - generated));
            for (a, b) in (0..factors).flat_map(|a| (0..a).map(move |b| (a, b))) {
                let both = design.combinations.iter().filter(|levels| levels[a] == 1 && levels[b] == 1).count();
                assert_eq!(both * 4, count);
            }
        }
        let names = ["a=0,1", "b=0,1", "c=0,1", "d=0,1", "e=0,1", "f=0,1", "g=0,1"];
        let words = design(&names, 4).unwrap().limits[0].split(": ").nth(2).unwrap().to_owned();
        let mut lengths: Vec<usize> = words.split(", ").map(|word| word.split(" × ").count()).collect();
        lengths.sort();
        assert_eq!(lengths, [4, 5, 5], "{words}");
    }

    #[test]
    fn other_fractions_are_chosen_so_that_levels_are_told_apart() {
        let factors = ["a=1,2,3", "b=1,2,3,4", "c=1,2"];
        let design = design(&factors, 2).unwrap();
        assert_eq!(design, super::design(&plan(&factors, 2, 1).factors, 2, 7).unwrap(), "the same by the same seed");
        assert_eq!(design.combinations.len(), 12);
        for (at, levels) in [3, 4, 2].into_iter().enumerate() {
            for level in 0..levels {
                let seen = design.combinations.iter().filter(|combination| combination[at] == level).count();
                assert!(seen.abs_diff(12 / levels) <= 1, "level {level} of factor {at} is there {seen} times");
            }
        }
        assert!(design.limits[0].starts_with("12 of 24 combinations, chosen at random"), "{:?}", design.limits);
        assert!(design.limits[1].contains("told apart worst (correlation -0.33)"), "{:?}", design.limits);
    }

    #[test]
    fn too_small_a_fraction_is_refused() {
        assert!(design(&["a=1,2", "b=1,2"], 2).unwrap_err().contains("cannot tell 2 factors apart"));
        assert!(design(&["a=1,2", "b=1,2", "c=1,2"], 4).unwrap_err().contains("1/4 cannot tell 3 factors apart"));
        // Eight factors need more than the four combinations of two free ones, whose only product is taken once.
        assert!(design(&["a=1,2", "b=1,2", "c=1,2", "d=1,2"], 4).unwrap_err().contains("1/4 cannot tell 4"));
        assert!(design(&["a=1,2,3", "b=1,2,3"], 3).unwrap_err().contains("is 3; the levels need 5"));
    }
}
