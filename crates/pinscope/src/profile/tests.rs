use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::layout::Layout;
use crate::map::{ModelFile, TensorInfo};

const LAYERS: usize = 2;
const EXPERTS: u64 = 8;

/// Two layers of eight experts of one page, two for a token.
fn map() -> ExpertMap {
    let tensors = (0..LAYERS as u64).map(|layer| TensorInfo {
        name: format!("blk.{layer}.ffn_up_exps.weight"),
        file: 0,
        offset: layer * EXPERTS * 4096,
        size: EXPERTS * 4096,
        ne: [1, 1, EXPERTS, 1],
    });
    let len = LAYERS as u64 * EXPERTS * 4096;
    let files = vec![ModelFile { path: "/m/small.gguf".into(), len, header_len: 0 }];
    ExpertMap::new(files, tensors.collect(), 2).unwrap()
}

fn model(id: &str) -> ProfiledModel {
    ProfiledModel {
        id: ModelId::parse(&id.repeat(64)).unwrap(),
        name: format!("{id}.gguf"),
        layers: vec![0, 1],
        experts_per_layer: EXPERTS as u32,
        top_k: 2,
    }
}

/// Generated tokens that choose each expert so many times.
fn decoded(tokens: f64, chosen: [f64; 16]) -> RoutingCounts {
    let mut c = RoutingCounts::new(16);
    (c.decode.tokens, c.decode.chosen) = (tokens, chosen.to_vec());
    c.decode.weight = chosen.iter().map(|n| n * 0.25).collect();
    c
}

/// All of the traffic goes to two experts of each layer.
fn skewed(hot: [usize; 4]) -> RoutingCounts {
    let mut chosen = [0.0; 16];
    hot.iter().for_each(|&e| chosen[e] = 100.0);
    decoded(100.0, chosen)
}

#[test]
fn a_profile_comes_back_from_its_file_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.json");
    let mut profile = Profile::new(model("a"));
    profile.record(&skewed([0, 1, 8, 9]));
    profile.record(&decoded(3.0, [0.5; 16]));
    profile.save(&path).unwrap();
    assert_eq!(Profile::load(&path).unwrap(), profile);
    let left: Vec<_> = std::fs::read_dir(&dir).unwrap().collect();
    assert_eq!(left.len(), 1, "nothing else is left in the folder: {left:?}");
}

#[test]
fn adding_to_a_file_that_is_not_there_makes_it_and_then_sums_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.json");
    let piece = decoded(10.0, [1.0; 16]);
    for _ in 0..2 {
        Profile::append(&path, &model("a"), std::slice::from_ref(&piece)).unwrap();
    }
    let profile = Profile::load(&path).unwrap();
    let sum = profile.total();
    assert_eq!((sum.decode.tokens, sum.decode.chosen[3]), (20.0, 2.0));
    assert_eq!(profile.halves()[0], profile.halves()[1], "the halves take turns");
    let refused = Profile::append(&path, &model("b"), &[piece]).unwrap_err();
    assert!(matches!(refused, ProfileError::OtherModel { .. }));
}

#[test]
fn processes_that_add_at_the_same_time_all_get_theirs_in() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.json");
    let pieces = [decoded(1.0, [1.0; 16])];
    let add = || (0..10).for_each(|_| Profile::append(&path, &model("a"), &pieces).unwrap());
    std::thread::scope(|s| {
        for _ in 0..8 {
            s.spawn(add);
        }
    });
    assert_eq!(Profile::load(&path).unwrap().total().decode.tokens, 80.0);
}

#[test]
fn a_profile_of_another_model_is_refused_by_name() {
    let (mut a, b) = (Profile::new(model("a")), Profile::new(model("b")));
    let error = a.merge(&b, 1.0).unwrap_err().to_string();
    assert!(error.contains("made with b.gguf, and this is a.gguf"), "{error}");
}

#[test]
fn merging_weighs_what_is_merged() {
    let mut a = Profile::new(model("a"));
    a.record(&decoded(10.0, [1.0; 16]));
    let other = a.clone();
    a.merge(&other, 0.5).unwrap();
    assert_eq!(a.total().decode.tokens, 15.0);
    assert_eq!(a.total().decode.chosen, [1.5; 16]);
}

#[test]
fn files_that_are_no_profiles_are_refused_with_the_reason() {
    let parse = |text: &str| Profile::parse(text, Path::new("p")).unwrap_err().to_string();
    assert!(parse("not json").contains("not a profile"));
    assert!(parse(r#"{"format":"other","version":1}"#).contains("\"other\""));
    let newer = r#"{"format":"pinscope-profile","version":2,"new":[]}"#;
    assert!(parse(newer).contains("version 2"));
    let good = Profile::new(model("a"));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p");
    good.save(&path).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    for (from, to) in [
        ("\"layers\":[0,1]", "\"layers\":[0,1,2]"),
        ("\"tokens\":0.0", "\"tokens\":-1.0"),
        ("[[0.0,", "[[-0.5,"),
        ("[[0.0,", "[["),
        ("aaaa", "zzzz"),
    ] {
        let bad = text.replacen(from, to, 1);
        assert_ne!(bad, text, "{from} is in the file");
        assert!(parse(&bad).contains("not a profile"), "{from} -> {to}");
    }
}

proptest! {
    #[test]
    fn no_text_makes_reading_a_profile_panic(text: String, cut in 0usize..2000, at in 0usize..2000) {
        let _ = Profile::parse(&text, Path::new("p"));
        // A good one with a piece missing.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p");
        Profile::new(model("a")).save(&path).unwrap();
        let good = std::fs::read(&path).unwrap();
        let (from, to) = (at.min(good.len()), (at + cut).min(good.len()));
        let bad = [&good[..from], &good[to..]].concat();
        let _ = Profile::parse(&String::from_utf8_lossy(&bad), Path::new("p"));
    }

    #[test]
    fn coverage_is_that_of_the_best_experts_of_one_half_in_the_other(
        a in prop::array::uniform16(0u32..5), b in prop::array::uniform16(0u32..5), n in 0usize..=16,
    ) {
        prop_assume!(a.iter().sum::<u32>() > 0 && b.iter().sum::<u32>() > 0);
        let mut profile = Profile::new(model("a"));
        profile.record(&decoded(100.0, a.map(f64::from)));
        profile.record(&decoded(100.0, b.map(f64::from)));
        let coverage = profile.coverage(0..LAYERS);
        // Of all sets of n experts the one with the largest sum.
        let best = |of: &[u32; 16]| {
            let mut order: Vec<usize> = (0..16).collect();
            order.sort_by_key(|&i| (std::cmp::Reverse(of[i]), i));
            order[..n].to_vec()
        };
        let share = |set: &[usize], of: &[u32; 16]| {
            set.iter().map(|&i| of[i]).sum::<u32>() as f64 / of.iter().sum::<u32>() as f64
        };
        let part = n as f64 / 16.0;
        let own = (share(&best(&a), &a) + share(&best(&b), &b)) / 2.0;
        let held_out = (share(&best(&a), &b) + share(&best(&b), &a)) / 2.0;
        prop_assert!((coverage.own(part) - own).abs() < 1e-9);
        prop_assert!((coverage.held_out(part).unwrap() - held_out).abs() < 1e-9);
    }
}

#[test]
fn a_profile_that_only_learnt_its_own_text_covers_nothing_held_out() {
    let mut profile = Profile::new(model("a"));
    profile.record(&skewed([0, 1, 8, 9]));
    profile.record(&skewed([2, 3, 10, 11]));
    let coverage = profile.coverage(0..LAYERS);
    assert_eq!(coverage.own(0.25), 1.0);
    assert_eq!(coverage.held_out(0.25), Some(0.0));
}

fn plan(profile: &Profile, share: Option<f64>) -> PinPlan {
    let map = map();
    // Ten of sixteen experts have a slot.
    let layout = Layout::new(&map, 10 * 4096).unwrap();
    assert_eq!(layout.classes[0].slots, 10);
    PinPlan::new(profile, &map, &layout, share)
}

#[test]
fn skewed_traffic_is_pinned_and_promises_what_it_keeps() {
    let mut profile = Profile::new(model("a"));
    profile.record(&skewed([0, 1, 8, 9]));
    profile.record(&skewed([0, 1, 8, 9]));
    let plan = plan(&profile, None);
    assert_eq!((plan.share, plan.promise, plan.flat), (1.0, 1.0, false));
    // Only four were ever chosen; six more slots could be pinned.
    assert_eq!(plan.pins.iter().map(|p| p.0).collect::<Vec<_>>(), [0, 1, 8, 9]);
}

#[test]
fn a_flat_router_is_recognised_and_pins_nothing() {
    let mut profile = Profile::new(model("a"));
    profile.record(&decoded(100.0, [25.0; 16]));
    profile.record(&decoded(100.0, [25.0; 16]));
    let plan = plan(&profile, None);
    assert!(plan.flat && plan.pins.is_empty(), "{plan:?}");
}

#[test]
fn the_share_can_be_chosen_but_a_layers_need_stays_free() {
    let mut profile = Profile::new(model("a"));
    let falling = std::array::from_fn(|i| 100.0 - i as f64);
    profile.record(&decoded(100.0, falling));
    assert_eq!(plan(&profile, Some(0.0)).pins, []);
    let half: Vec<u32> = plan(&profile, Some(0.5)).pins.iter().map(|p| p.0).collect();
    assert_eq!(half, [0, 1, 2, 3, 4]);
    // Two layers' top-2 of the ten slots are left.
    assert_eq!(plan(&profile, Some(1.0)).pins.len(), 6);
}

/// Not a test: what the next one kills.
#[test]
#[ignore]
fn append_until_killed() {
    let Some(path) = std::env::var_os("PROFILE_TO_APPEND_TO") else { return };
    let pieces = [decoded(1.0, [1.0; 16])];
    loop {
        Profile::append(Path::new(&path), &model("a"), &pieces).unwrap();
    }
}

#[test]
fn killed_at_any_moment_a_writer_leaves_a_whole_profile() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.json");
    let mut last = 0.0;
    for round in 0..20u64 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "profile::tests::append_until_killed"])
            .env("PROFILE_TO_APPEND_TO", &path)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // From the first write on at any moment.
        while !path.exists() && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        std::thread::sleep(std::time::Duration::from_micros(round * 2100));
        child.kill().unwrap();
        child.wait().unwrap();
        let tokens = Profile::load(&path).unwrap().total().decode.tokens;
        assert!(tokens >= last, "what was there before is still there");
        last = tokens;
    }
    assert!(last >= 20.0, "{last}");
}
