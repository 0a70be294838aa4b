use proptest::prelude::*;

use super::super::tests::{drive, shape};
use super::*;
use crate::policy::{build, PolicyKind};

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

/// Hits of the last 200 of 400 tokens that choose experts in turn, one of 12.
fn hits_in_turn(kind: PolicyKind) -> usize {
    let shape = PolicyShape { layers: 1, experts_per_layer: 12, top_k: 1, capacity: 6 };
    let mut policy = build(kind, shape);
    let (mut resident, mut hits) = (Vec::new(), 0);
    for token in 0..400u32 {
        let e = ExpertId(token % 12);
        policy.on_pass(0, 1);
        policy.on_select(e, 1, 1.0);
        if resident.contains(&e) {
            hits += usize::from(token >= 200);
        } else {
            if resident.len() == 6 {
                let victim = policy.victim(e, &|v| v == e).unwrap();
                resident.retain(|r| *r != victim);
                policy.on_remove(victim);
            }
            resident.push(e);
            policy.on_insert(e);
        }
        policy.on_token();
    }
    hits
}

#[test]
fn it_learns_that_who_was_just_chosen_is_not_needed_soon() {
    assert_eq!(hits_in_turn(PolicyKind::Lru), 0);
    // The best that can be done is 5 of 11.
    let hits = hits_in_turn(PolicyKind::Adaptive);
    assert!(hits > 60, "{hits} of 200");
}
