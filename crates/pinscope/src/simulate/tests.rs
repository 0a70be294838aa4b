mod mixed;

use proptest::prelude::*;

use super::*;
use crate::policy::{build, PolicyKind};
use crate::splitmix::SplitMix64;
use crate::trace::{Choice, Pass, Trace, TracedLayer, TracedModel};

/// Layers whose experts have these sizes, bytes.
fn model(sizes: &[u64], experts: u32) -> TracedModel {
    let layer = |(i, &bytes): (usize, &u64)| TracedLayer {
        index: i as u32,
        experts,
        parts: vec![(0, bytes)],
    };
    TracedModel {
        id: None,
        name: "m".into(),
        experts_per_layer: experts,
        top_k: 2,
        layers: sizes.iter().enumerate().map(layer).collect(),
    }
}

fn trace(model: TracedModel, passes: &[(u32, &[u32])]) -> Trace {
    let pass = |&(layer, experts): &(u32, &[u32])| Pass {
        layer,
        tokens: 1,
        decode: true,
        choices: experts.iter().map(|&expert| Choice { expert, tokens: 1, weight: 0.5 }).collect(),
    };
    Trace { model, passes: passes.iter().map(pass).collect(), cut: false, caveat: None }
}

fn random(seed: u64, sizes: &[u64], experts: u32, tokens: usize) -> Trace {
    let mut rng = SplitMix64(seed);
    let mut passes = Vec::new();
    for _ in 0..tokens {
        for layer in 0..sizes.len() as u32 {
            let a = rng.below(experts as usize).min(rng.below(experts as usize)) as u32;
            let b = rng.below(experts as usize).min(rng.below(experts as usize)) as u32;
            passes.push((layer, if a == b { vec![a] } else { vec![a, b] }));
        }
    }
    let passes: Vec<_> = passes.iter().map(|(l, e)| (*l, &e[..])).collect();
    trace(model(sizes, experts), &passes)
}

const PAGE: u64 = crate::layout::PAGE;

/// The fewest misses by trying every victim: `cache` holds `capacity` experts.
fn fewest_misses(passes: &[Vec<u32>], capacity: usize, cache: &[u32]) -> u64 {
    let Some((now, rest)) = passes.split_first() else { return 0 };
    fn load(
        missing: &[u32],
        now: &[u32],
        rest: &[Vec<u32>],
        capacity: usize,
        cache: &[u32],
    ) -> u64 {
        let Some((&e, others)) = missing.split_first() else {
            return fewest_misses(rest, capacity, cache);
        };
        let with = |cache: Vec<u32>| 1 + load(others, now, rest, capacity, &cache);
        if cache.len() < capacity {
            return with([cache, &[e]].concat());
        }
        let victims = cache.iter().filter(|v| !now.contains(v));
        let without = |v: &u32| {
            let mut left: Vec<u32> = cache.iter().copied().filter(|c| c != v).collect();
            left.push(e);
            with(left)
        };
        victims.map(without).min().unwrap()
    }
    let missing: Vec<u32> = now.iter().copied().filter(|e| !cache.contains(e)).collect();
    load(&missing, now, rest, capacity, cache)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn belady_has_exactly_the_fewest_misses_that_any_choice_of_victims_has(seed: u64) {
        let trace = random(seed, &[PAGE, PAGE], 4, 5);
        let flat: Vec<Vec<u32>> = trace.passes.iter()
            .map(|p| p.choices.iter().map(|c| p.layer * 4 + c.expert).collect())
            .collect();
        for slots in 2..5 {
            let room = Room::slots(&trace.model, slots * PAGE).unwrap();
            let best = belady(&trace, &room, Warm::default()).decode;
            prop_assert_eq!(best.misses, fewest_misses(&flat, slots as usize, &[]));
        }
    }

    #[test]
    fn no_policy_is_better_than_belady_and_all_agree_on_what_was_asked_for(
        seed: u64,
        permille in 100u64..1200,
    ) {
        let trace = random(seed, &[PAGE, 2 * PAGE, PAGE, 2 * PAGE], 16, 40);
        let asked: usize = trace.passes.iter().map(|p| p.choices.len()).sum();
        let bytes = 96 * PAGE * permille / 1000;
        let room = Room::slots(&trace.model, bytes).unwrap();
        let best = belady(&trace, &room, Warm::default()).decode;
        for kind in PolicyKind::ALL {
            let got = replay(&trace, &room, &mut |s| build(kind, s), Warm::default()).decode;
            prop_assert!(got.misses >= best.misses, "{kind}");
            prop_assert_eq!((got.hits + got.misses, got.tokens), (asked as u64, 40));
        }
    }
}

#[test]
fn bytes_read_are_those_of_the_layers_that_missed() {
    let t = trace(model(&[PAGE, 3 * PAGE], 4), &[(0, &[0, 1]), (1, &[2]), (0, &[0]), (1, &[2, 3])]);
    let room = Room::slots(&t.model, 16 * PAGE).unwrap();
    let got = replay(&t, &room, &mut |s| build(PolicyKind::Lru, s), Warm::default()).decode;
    assert_eq!((got.hits, got.misses, got.bytes), (2, 4, (2 + 2 * 3) * PAGE));
    assert_eq!((got.bytes_a_token(), got.hit_rate()), ((4 * PAGE) as f64, 2.0 / 6.0));
}

#[test]
fn a_pass_that_needs_more_than_there_is_runs_in_waves() {
    let t = trace(model(&[PAGE], 8), &[(0, &[0, 1, 2, 3, 4]), (0, &[4])]);
    let room = Room::slots(&t.model, 2 * PAGE).unwrap();
    let got = replay(&t, &room, &mut |s| build(PolicyKind::Lru, s), Warm::default()).decode;
    assert_eq!((got.hits, got.misses), (1, 5));
    assert_eq!(belady(&t, &room, Warm::default()).decode, got);
}

#[test]
fn room_for_nothing_hits_nothing() {
    let t = random(1, &[PAGE], 8, 10);
    let room = Room::shared(&t.model.map().unwrap(), PAGE - 1);
    let got = belady(&t, &room, Warm::default()).decode;
    assert_eq!(got.hits, 0);
    assert!(Room::slots(&t.model, PAGE).unwrap_err().to_string().contains("too few"));
}

#[test]
fn a_profile_fills_the_room_and_passes_to_warm_up_do_not_count() {
    let t = trace(model(&[PAGE], 8), &[(0, &[0, 1]), (0, &[0, 1]), (0, &[0, 1])]);
    let room = Room::slots(&t.model, 2 * PAGE).unwrap();
    let run = |warm| replay(&t, &room, &mut |s| build(PolicyKind::Lfu, s), warm).decode;
    let mut rates = [0.0; 8];
    (rates[0], rates[1], rates[2]) = (0.9, 0.8, 0.1);
    assert_eq!(run(Warm { rates: Some(&rates), passes: 0 }).misses, 0);
    let warmed = run(Warm { rates: None, passes: 1 });
    assert_eq!((warmed.hits, warmed.misses, warmed.tokens), (4, 0, 2));
    assert_eq!(run(Warm::default()).misses, 2);
}
