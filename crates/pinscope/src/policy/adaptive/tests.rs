use proptest::prelude::*;

use super::super::tests::{drive, shape};
use super::*;
use crate::policy::{build, PolicyKind};
use crate::splitmix::SplitMix64;

fn frozen(shape: PolicyShape) -> Adaptive {
    Adaptive { learner: Learner::frozen(), usual: Learner::frozen(), ..Adaptive::new(shape) }
}

/// The chance of a choice from the plain history, by the first coefficients.
fn chance(history: &[Vec<ExpertId>], shape: PolicyShape, e: ExpertId) -> f64 {
    let layer = shape.layer(e);
    let reached = history.iter().filter(|t| t.iter().any(|x| shape.layer(*x) == layer));
    let newest_first: Vec<bool> = reached.rev().map(|t| t.contains(&e)).collect();
    let average = f64::from(shape.top_k) / f64::from(shape.experts_per_layer);
    let rate = |kept: f64| {
        let (mut chosen, mut all) = (0.0, 0.0);
        for (age, was) in newest_first.iter().enumerate() {
            all += kept.powi(age as i32);
            chosen += if *was { kept.powi(age as i32) } else { 0.0 };
        }
        ((chosen / average + 1.0) / (all + 1.0)).ln()
    };
    let age = newest_first.iter().position(|was| *was);
    let weight = age.filter(|a| *a < 6).map_or(0.0, |a| 0.7f64.powi(a as i32));
    let last = if age == Some(0) { 1.0 } else { 0.0 };
    let sum = -1.6 + 0.4 * rate(0.9) + 0.2 * (rate(0.98) + rate(0.998) + weight) + 0.35 * last;
    1.0 / (1.0 + (-sum).exp())
}

proptest! {
    #[test]
    fn the_victim_is_expected_to_be_needed_last(seed: u64, capacity in 3usize..30) {
        let shape = shape(4, 8, capacity);
        drive(&mut frozen(shape), shape, seed, |history, victim, candidates| {
            // Whoever makes room is of the layer that the token reached last.
            let at = shape.layer(*history.last().unwrap().last().unwrap());
            let away = |e: &ExpertId| {
                let behind = (at + 4 - shape.layer(*e) + 3) % 4;
                1.0 / chance(history, shape, *e) - behind as f64 / 4.0
            };
            let furthest = candidates.iter().map(away).fold(f64::MIN, f64::max);
            assert!(away(&victim) >= furthest - 1e-9 * furthest.abs());
        });
    }
}

#[test]
fn a_prompt_counts_like_as_many_tokens_at_its_rate() {
    let shape = shape(1, 8, 4);
    let (mut prompt, mut tokens) = (frozen(shape), frozen(shape));
    prompt.on_pass(0, 50);
    (0..3).for_each(|e| prompt.on_select(ExpertId(e), 50, 0.3));
    prompt.on_token();
    for _ in 0..50 {
        tokens.on_pass(0, 1);
        (0..3).for_each(|e| tokens.on_select(ExpertId(e), 1, 0.3));
        tokens.on_token();
    }
    for e in 0..8 {
        assert!((prompt.chances(e).0 - tokens.chances(e).0).abs() < 1e-9);
    }
    assert!(prompt.chances(0).0 > 3.0 * prompt.chances(3).0);
}

#[test]
fn a_profile_says_who_stays_before_anything_was_chosen() {
    let shape = shape(1, 8, 4);
    let mut policy = Adaptive::new(shape);
    (0..4).for_each(|e| policy.on_insert(ExpertId(e)));
    for (e, rate) in [(0, 0.9), (1, 0.2), (2, 0.01), (3, 0.5)] {
        policy.warm(ExpertId(e), rate);
    }
    assert_eq!(policy.victim(ExpertId(7), &|_| false), Some(ExpertId(2)));
    assert_eq!(policy.victim(ExpertId(7), &|e| e.0 == 2), Some(ExpertId(1)));
}

/// Hits of the second half of `tokens`, each a list of experts in the order of
/// layers.
fn hits(policy: &mut dyn Policy, shape: PolicyShape, tokens: &[Vec<ExpertId>]) -> usize {
    let (mut resident, mut hits) = (Vec::new(), 0);
    for (number, token) in tokens.iter().enumerate() {
        for wanted in token.chunk_by(|a, b| shape.layer(*a) == shape.layer(*b)) {
            policy.on_pass(shape.layer(wanted[0]) as u32, 1);
            wanted.iter().for_each(|e| policy.on_select(*e, 1, 1.0));
            for e in wanted {
                if resident.contains(e) {
                    hits += usize::from(number >= tokens.len() / 2);
                    continue;
                }
                if resident.len() == shape.capacity {
                    let victim = policy.victim(*e, &|v| wanted.contains(&v)).unwrap();
                    resident.retain(|r| *r != victim);
                    policy.on_remove(victim);
                }
                resident.push(*e);
                policy.on_insert(*e);
            }
        }
        policy.on_token();
    }
    hits
}

#[test]
fn it_learns_that_who_was_just_chosen_is_not_needed_soon() {
    let shape = PolicyShape { layers: 1, experts_per_layer: 12, top_k: 1, capacity: 6 };
    let in_turn: Vec<_> = (0..400).map(|token| vec![ExpertId(token % 12)]).collect();
    assert_eq!(hits(&mut *build(PolicyKind::Lru, shape), shape, &in_turn), 0);
    // The best that can be done is 5 of 11.
    let hits = hits(&mut Adaptive::new(shape), shape, &in_turn);
    assert!(hits > 60, "{hits} of 200");
}

/// 600 tokens of a text of 30 words; a word chooses the same experts each
/// time, and is followed by the same word mostly.
fn text(shape: PolicyShape) -> Vec<Vec<ExpertId>> {
    let mut rng = SplitMix64(5);
    let mut word = || -> Vec<ExpertId> {
        let per_layer = shape.experts_per_layer as usize;
        let layer = |l: u32| {
            let two = [rng.below(per_layer), rng.below(per_layer)];
            two.map(|e| ExpertId(l * shape.experts_per_layer + e as u32))
        };
        let mut chosen: Vec<_> = (0..shape.layers).flat_map(layer).collect();
        chosen.dedup();
        chosen
    };
    let words: Vec<_> = (0..30).map(|_| word()).collect();
    let mut at = 0;
    let mut next = || {
        at = if rng.chance(0.8) { (at + 1) % 30 } else { rng.below(30) };
        words[at].clone()
    };
    (0..600).map(|_| next()).collect()
}

#[test]
fn words_that_come_back_are_known_by_what_they_chose_before() {
    let shape = PolicyShape { layers: 8, experts_per_layer: 16, top_k: 2, capacity: 24 };
    let text = text(shape);
    let mut deaf = Adaptive { learner: Learner::deaf(), ..Adaptive::new(shape) };
    let deaf = hits(&mut deaf, shape, &text);
    let hits = hits(&mut Adaptive::new(shape), shape, &text);
    assert!(hits * 100 > deaf * 108, "{hits} hits, and {deaf} without the echo");
}

#[test]
fn weights_that_are_no_numbers_do_no_harm() {
    let shape = shape(4, 8, 10);
    let mut policy = Adaptive::new(shape);
    for token in 0..50u32 {
        for l in 0..4 {
            policy.on_pass(l, 1);
            let e = ExpertId(l * 8 + token * 3 % 8);
            policy.on_select(e, 1, [f32::NAN, f32::INFINITY, -1.0, 0.0][token as usize % 4]);
        }
        policy.on_token();
    }
    for e in 0..32 {
        let (next, usual) = policy.chances(e);
        assert!(next > 0.0 && next < 1.0 && usual > 0.0 && usual < 1.0, "{next} {usual}");
    }
}
