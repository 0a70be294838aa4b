use super::*;
use crate::profile::PinPlan;

const CALM: FaultPlan = FaultPlan { seed: 1, delay: 0.0, fail: 0.0, retry: 0.0, reorder: false };

/// Pins a share of the slots, experts in order of `rate`.
fn plan(rate: Vec<f64>, share: f64, promise: f64) -> PinPlan {
    PinPlan { pins: Vec::new(), share, promise, rate, flat: false }
}

/// Rates of 18 experts, of which those in `hot` are hot.
fn rate(hot: &[usize]) -> Vec<f64> {
    (0..18).map(|i| if hot.contains(&i) { 0.9 } else { 0.001 }).collect()
}

/// Most of the slots of both classes, but not all.
fn arena(map: &ExpertMap) -> u64 {
    Layout::full_bytes(map) * 9 / 10
}

/// The pinned ones of layers 0 and 2, whose experts are of one size.
fn pinned(r: &Residency) -> Vec<usize> {
    (0..18).filter(|&i| !(6..12).contains(&i) && r.is_pinned[i]).collect()
}

#[test]
fn pinned_experts_are_loaded_at_once_and_never_give_way() {
    let dir = tempfile::tempdir().unwrap();
    let (map, file) = model(dir.path());
    let mut r = residency(&map, arena(&map), CALM);
    r.pin(&plan(rate(&[2, 3, 13]), 0.3, 1.0), true);
    assert_eq!(pinned(&r), [2, 3, 13]);
    r.load_pins(&mut |_| {}).unwrap();
    // And one of layer 1, whose experts are larger.
    assert_eq!(r.stats().prompt.bytes_read, 3 * 13_000 + 19_000);
    // Everything else of the class passes through.
    for _ in 0..20 {
        for experts in [&[0, 1], &[4, 5]] {
            pass(&mut r, &file, 0, experts).unwrap();
            pass(&mut r, &file, 2, experts).unwrap();
        }
    }
    let before = r.stats().decode;
    pass(&mut r, &file, 0, &[2, 3]).unwrap();
    pass(&mut r, &file, 2, &[1]).unwrap();
    let c = r.stats().decode.since(&before);
    assert_eq!((c.hits, c.pinned_hits, c.misses), (3, 3, 0));
}

#[test]
fn an_expert_that_is_pinned_while_it_is_in_ram_stays_and_one_that_is_let_go_leaves() {
    let dir = tempfile::tempdir().unwrap();
    let (map, file) = model(dir.path());
    // Two slots fewer than what the flood and the two need.
    let mut r = residency(&map, Layout::full_bytes(&map) * 7 / 10, CALM);
    let flood = |r: &mut Residency| {
        for _ in 0..20 {
            for experts in [&[0, 1], &[4, 5]] {
                pass(r, &file, 0, experts).unwrap();
                pass(r, &file, 2, experts).unwrap();
            }
        }
    };
    let misses = |r: &mut Residency| {
        let before = r.stats().decode.misses;
        pass(r, &file, 0, &[2, 3]).unwrap();
        r.stats().decode.misses - before
    };
    pass(&mut r, &file, 0, &[2, 3]).unwrap();
    r.pin(&plan(rate(&[2, 3]), 0.3, 1.0), false);
    flood(&mut r);
    assert_eq!(misses(&mut r), 0);
    r.pin(&plan(rate(&[12, 13]), 0.3, 1.0), false);
    flood(&mut r);
    assert!(misses(&mut r) > 0);
}

#[test]
fn pins_follow_the_traffic_and_the_user_hears_of_it_once() {
    let dir = tempfile::tempdir().unwrap();
    let (map, file) = model(dir.path());
    let mut r = residency(&map, arena(&map), CALM);
    r.pin(&plan(rate(&[2, 3, 14]), 0.3, 0.9), true);
    let token = |r: &mut Residency| {
        pass(r, &file, 0, &[0, 1]).unwrap();
        pass(r, &file, 2, &[0, 1]).unwrap();
    };
    let moved = (0..1000).find(|_| {
        token(&mut r);
        r.stats().repins > 0
    });
    assert!(moved.is_some_and(|n| (64..200).contains(&n)), "{moved:?}");
    let news = r.take_news().unwrap();
    assert!(news.contains("promised 90 %"), "{news}");
    assert!(pinned(&r).iter().all(|i| [0, 1, 12, 13].contains(i)), "{:?}", pinned(&r));
    (0..500).for_each(|_| token(&mut r));
    assert_eq!((r.stats().repins, r.take_news()), (1, None));
}

#[test]
fn pins_stay_when_they_are_told_to() {
    let dir = tempfile::tempdir().unwrap();
    let (map, file) = model(dir.path());
    let mut r = residency(&map, arena(&map), CALM);
    r.pin(&plan(rate(&[2, 3, 14]), 0.3, 0.9), false);
    for _ in 0..300 {
        pass(&mut r, &file, 0, &[0, 1]).unwrap();
        pass(&mut r, &file, 2, &[0, 1]).unwrap();
    }
    assert!(r.take_news().unwrap().contains("--no-repin"));
    assert_eq!((pinned(&r), r.stats().repins), (vec![2, 3, 14], 0));
}

#[test]
fn what_the_router_chose_is_counted_once_a_layer_and_phase() {
    let dir = tempfile::tempdir().unwrap();
    let (map, _) = model(dir.path());
    let mut r = residency(&map, arena(&map), CALM);
    let mut ready = Vec::new();
    let mut run = |layer, tokens, expert| {
        r.begin(layer, tokens, &[Demand { expert, tokens: tokens as u32, weight: 0.25 }]).unwrap();
        r.take_ready(false, &mut ready).unwrap();
        r.finish(&ready).unwrap();
    };
    // A prompt of three tokens, then one token whose layer 1 comes in two passes.
    [0, 1, 2].iter().for_each(|&layer| run(layer, 3, 5));
    [0, 1, 1, 2].iter().for_each(|&layer| run(layer, 1, 4));
    let counts = r.take_routing();
    assert_eq!((counts.prefill.tokens, counts.decode.tokens), (3.0, 1.0));
    let nonzero = |c: &[f64]| -> Vec<(usize, f64)> {
        c.iter().copied().enumerate().filter(|(_, n)| *n > 0.0).collect()
    };
    assert_eq!(nonzero(&counts.prefill.chosen), [(5, 3.0), (11, 3.0), (17, 3.0)]);
    assert_eq!(nonzero(&counts.decode.chosen), [(4, 1.0), (10, 1.0), (16, 1.0)]);
    assert_eq!(nonzero(&counts.decode.weight), [(4, 0.25), (10, 0.25), (16, 0.25)]);
    assert!(r.take_routing().is_empty());
}

proptest! {
    #[test]
    fn pins_change_no_bytes_whatever_moves(
        passes in passes(), seed: u64, share in 0.0..=1.0f64, hot in any::<u16>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let (map, file) = model(dir.path());
        let faults = FaultPlan { seed, delay: 0.3, fail: 0.0, retry: 0.1, reorder: true };
        let mut r = residency(&map, arena(&map), faults);
        let rates = |bits: u16| (0..18).map(|i| f64::from(bits >> (i % 16) & 1)).collect();
        for (i, (layer, experts)) in passes.iter().enumerate() {
            r.pin(&plan(rates(hot.rotate_left(i as u32)), share, 0.5), i % 2 == 0);
            if i % 3 == 0 {
                r.load_pins(&mut |_| {}).unwrap();
            }
            pass(&mut r, &file, *layer, experts).unwrap();
        }
    }
}
