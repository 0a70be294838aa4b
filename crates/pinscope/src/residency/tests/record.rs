//! What is recorded is what happened, and a replay of it counts the same.

use super::*;
use crate::profile::ProfiledModel;
use crate::simulate::{replay, Room, Warm};
use crate::splitmix::SplitMix64;
use crate::trace::{Recorder, Trace, TracedModel};

#[test]
fn a_replay_of_a_recording_counts_what_the_residency_counted() {
    let dir = tempfile::tempdir().unwrap();
    let (map, _) = model(dir.path());
    let bytes = Layout::full_bytes(&map) * 6 / 10;
    let plan = FaultPlan { seed: 1, delay: 0.3, fail: 0.0, retry: 0.0, reorder: true };
    let mut r = residency(&map, bytes, plan);
    let path = dir.path().join("t.trace");
    let traced = TracedModel::new(&map, &ProfiledModel::of(&map).unwrap());
    r.record_trace(Recorder::create(&path, &traced).unwrap());
    let mut rng = SplitMix64(3);
    let mut ready = Vec::new();
    for token in 0..60 {
        for layer in 0..3 {
            let mut chosen: Vec<u32> =
                (0..2).map(|_| rng.below(6).min(rng.below(6)) as u32).collect();
            chosen.dedup();
            let tokens = if token == 0 { 7 } else { 1 };
            let demand = |&expert: &u32| Demand { expert, tokens, weight: 0.5 * tokens as f32 };
            let demand: Vec<_> = chosen.iter().map(demand).collect();
            r.begin(layer, tokens as usize, &demand).unwrap();
            loop {
                r.take_ready(false, &mut ready).unwrap();
                if ready.is_empty() {
                    break;
                }
                r.finish(&ready).unwrap();
            }
        }
    }
    r.finish_trace().unwrap();
    let trace = Trace::load(&path).unwrap();
    assert_eq!((trace.model.clone(), trace.tokens()), (traced, (7, 59)));
    let room = Room::slots(&trace.model, bytes).unwrap();
    let build = &mut |shape| policy::build(PolicyKind::default(), shape);
    let replayed = replay(&trace, &room, build, Warm::default());
    let stats = r.stats();
    for (ours, theirs) in [(replayed.prompt, stats.prompt), (replayed.decode, stats.decode)] {
        assert_eq!(
            (ours.tokens, ours.hits, ours.misses, ours.bytes),
            (theirs.tokens, theirs.hits, theirs.misses, theirs.bytes_read)
        );
    }
    assert!(replayed.decode.misses > 20 && replayed.decode.hits > 20);
}
