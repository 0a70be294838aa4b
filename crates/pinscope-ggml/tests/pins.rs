//! Profiles and pins, against what llama.cpp itself says and computes.

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use common::{model, one_at_a_time, run, run_with};
use pinscope::layout::Layout;
use pinscope::policy::PolicyKind;
use pinscope::profile::{PinPlan, Profile, ProfiledModel};
use pinscope::reader::ReaderKind;
use pinscope_ggml::{read_map, Engine, EngineOptions};
use pinscope_host::{ContextOptions, TensorObserver, TensorView};
use pinscope_models::synth::ExpertTypes;

/// An engine with `permille` of the room that all experts need.
fn engine(path: &Path, permille: u64, pins: Option<PinPlan>) -> Engine {
    let map = read_map(path).unwrap();
    let arena_bytes = Layout::full_bytes(&map) * permille / 1000;
    Engine::register(EngineOptions {
        map,
        arena_bytes,
        policy: PolicyKind::default(),
        reader: ReaderKind::Auto,
        pins,
        repin: true,
        prefetch: true,
    })
    .unwrap()
}

/// Choices of layer and expert in prompts and in generation, with weights.
type Choices = BTreeMap<(bool, usize, i32), (u32, f32)>;

/// Listens to llama.cpp's own routers.
#[derive(Default)]
struct Listener {
    /// The router's choice of the layer at hand.
    chosen: Vec<i32>,
    seen: Arc<Mutex<Choices>>,
}

impl TensorObserver for Listener {
    fn wants(&mut self, name: &str) -> bool {
        ["ffn_moe_topk-", "ffn_moe_weights_norm-"].iter().any(|n| {
            // Views of them have names that go on.
            name.strip_prefix(n).is_some_and(|layer| layer.parse::<usize>().is_ok())
        })
    }

    fn observe(&mut self, name: &str, t: &TensorView) {
        let (what, layer) = name.rsplit_once('-').unwrap();
        if what == "ffn_moe_topk" {
            self.chosen = t.i32().unwrap();
            return;
        }
        let weights = t.f32().unwrap();
        assert_eq!(weights.len(), self.chosen.len());
        let decode = t.ne[1] * t.ne[2] == 1 || weights.len() == t.ne[0] as usize;
        let mut seen = self.seen.lock().unwrap();
        for (expert, weight) in self.chosen.iter().zip(weights) {
            let entry = seen.entry((decode, layer.parse().unwrap(), *expert)).or_default();
            *entry = (entry.0 + 1, entry.1 + weight);
        }
    }
}

#[test]
fn what_is_counted_is_what_llama_cpps_routers_chose() {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), "tiny-qwen3moe", ExpertTypes::Shape);
    let seen = Arc::default();
    let listener: Box<dyn TensorObserver> =
        Box::new(Listener { seen: Arc::clone(&seen), ..Listener::default() });
    let options = ContextOptions { on_tensor: Some(listener), ..ContextOptions::default() };
    run_with(&path, options, None).unwrap();

    let engine = engine(&path, 400, None);
    run_with(&path, ContextOptions::default(), None).unwrap();
    let counts = engine.take_routing();
    let mut counted = Choices::new();
    let per_layer = read_map(&path).unwrap().experts_per_layer() as usize;
    for (decode, phase) in [(false, &counts.prefill), (true, &counts.decode)] {
        for (i, &n) in phase.chosen.iter().enumerate().filter(|(_, n)| **n > 0.0) {
            let key = (decode, i / per_layer, (i % per_layer) as i32);
            counted.insert(key, (n as u32, phase.weight[i] as f32));
        }
    }
    let seen = seen.lock().unwrap();
    assert!(seen.len() > 100);
    assert_eq!(counted.keys().collect::<Vec<_>>(), seen.keys().collect::<Vec<_>>());
    for (key, (n, weight)) in seen.iter() {
        let (counted_n, counted_weight) = counted[key];
        assert_eq!(counted_n, *n, "{key:?}");
        assert!((counted_weight - weight).abs() < 1e-3 * weight.max(0.1), "{key:?}");
    }
}

#[test]
fn pins_change_no_bit_whatever_their_share() {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    for shape in ["tiny-qwen3moe", "tiny-gpt-oss"] {
        let path = model(dir.path(), shape, ExpertTypes::Mixed);
        let reference = run(&path, 1).unwrap();
        let map = read_map(&path).unwrap();
        let mut profile = Profile::new(ProfiledModel::of(&map).unwrap());
        for _ in 0..2 {
            let engine = engine(&path, 500, None);
            run(&path, 1).unwrap();
            profile.record(&engine.take_routing());
        }
        let layout = Layout::new(&map, Layout::full_bytes(&map) * 600 / 1000).unwrap();
        let mut served = 0;
        for share in [0.0, 0.3, 1.0] {
            let plan = PinPlan::new(&profile, &map, &layout, Some(share));
            let engine = engine(&path, 600, Some(plan));
            engine.load_pins(&mut |_| {}).unwrap();
            assert_eq!(run(&path, 1).unwrap(), reference, "{shape}, share {share}");
            let hits = engine.stats().decode.pinned_hits;
            assert!(share > 0.0 || hits == 0);
            served = served.max(hits);
        }
        assert!(served > 0, "{shape}");
    }
}
