use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::*;
use crate::layout::Layout;
use crate::residency::Demand;

fn model(layers: u32, experts: u32) -> TracedModel {
    TracedModel {
        id: ModelId::parse(&"ab".repeat(32)),
        name: "müller.gguf".into(),
        experts_per_layer: experts,
        top_k: 2,
        layers: (0..layers)
            .map(|i| TracedLayer {
                index: i * 2 + 1,
                experts,
                parts: vec![(64, 9_000), (100, 9_000 + u64::from(i % 2) * 5_000)],
            })
            .collect(),
    }
}

/// A file in memory that stays when its writer is gone.
#[derive(Clone, Default)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl Write for Memory {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a recorder writes of `passes`; `finish` or be killed.
fn written(model: &TracedModel, passes: &[Pass], finish: bool) -> Vec<u8> {
    let memory = Memory::default();
    let mut recorder = Recorder::new(Box::new(memory.clone()), model).unwrap();
    for p in passes {
        let demand = |c: &Choice| Demand {
            expert: c.expert,
            tokens: c.tokens,
            weight: c.weight * c.tokens as f32,
        };
        let demand: Vec<_> = p.choices.iter().map(demand).collect();
        recorder.pass(p.layer as usize, p.tokens as usize, p.decode, &demand);
    }
    match finish {
        true => recorder.finish().unwrap(),
        false => drop(recorder),
    }
    let bytes = memory.0.lock().unwrap().clone();
    bytes
}

fn read(bytes: &[u8]) -> Result<Trace, TraceError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    Trace::load(file.path())
}

prop_compose! {
    fn any_pass()(
        layer in 0u32..5,
        tokens in prop_oneof![Just(1u32), 2u32..100_000],
        decode: bool,
        experts in prop::collection::btree_map(0u32..300, (any::<u32>(), 0.0f32..4.0), 0..12),
    ) -> Pass {
        let choice = |(expert, (by, weight)): (u32, (u32, f32))| Choice {
            expert, tokens: 1 + by % tokens, weight,
        };
        Pass { layer, tokens, decode, choices: experts.into_iter().map(choice).collect() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_recorded_is_read_back_and_weights_are_right_to_half_a_percent(
        passes in prop::collection::vec(any_pass(), 0..40),
    ) {
        let model = model(5, 300);
        let trace = read(&written(&model, &passes, true)).unwrap();
        prop_assert_eq!(&trace.model, &model);
        prop_assert!(!trace.cut);
        prop_assert_eq!(trace.passes.len(), passes.len());
        for (got, put) in trace.passes.iter().zip(&passes) {
            prop_assert_eq!((got.layer, got.tokens, got.decode), (put.layer, put.tokens, put.decode));
            prop_assert_eq!(got.choices.len(), put.choices.len());
            for (a, b) in got.choices.iter().zip(&put.choices) {
                prop_assert_eq!((a.expert, a.tokens), (b.expert, b.tokens));
                prop_assert!((a.weight - b.weight).abs() <= b.weight * 0.005 + 1e-30);
            }
        }
    }

    #[test]
    fn a_trace_that_ends_anywhere_has_its_whole_passes(
        passes in prop::collection::vec(any_pass(), 1..5),
    ) {
        let model = model(5, 300);
        let whole = written(&model, &passes, true);
        // Where the header and each pass end.
        let mut ends = vec![];
        for n in 0..=passes.len() {
            ends.push(written(&model, &passes[..n], true).len());
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().write_all(&whole).unwrap();
        for end in (0..whole.len()).rev() {
            file.as_file().set_len(end as u64).unwrap();
            match Trace::load(file.path()) {
                Err(e) => {
                    prop_assert!(end < ends[0], "{e}");
                    let words = if end == 0 { "begins otherwise" } else { "within its header" };
                    prop_assert!(e.to_string().contains(words), "{end}: {e}");
                }
                Ok(trace) => {
                    let there = ends.iter().rposition(|at| *at <= end).unwrap();
                    prop_assert_eq!(trace.passes.len(), there);
                    prop_assert_eq!(trace.cut, !ends.contains(&end));
                }
            }
        }
    }

    #[test]
    fn bytes_that_are_no_trace_are_an_error_and_no_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        at in any::<prop::sample::Index>(),
        value: u8,
        passes in prop::collection::vec(any_pass(), 1..6),
    ) {
        let _ = read(&bytes);
        let mut body = &bytes[..];
        let _ = Trace::parse(&mut body, Path::new("t"));
        for start in [&b"PINTRACE\x01\0\0\0"[..], b"# route_trace v1\n", b"# route_trace v1\n# n_expert=4 n_expert_used=2\n# layer=0 expert_bytes=1\n"] {
            let _ = read(&[start, &bytes].concat());
        }
        // One byte of a sound trace changed: an error, or other choices that
        // the model could have made.
        let model = model(5, 300);
        let mut damaged = written(&model, &passes, true);
        let at = at.index(damaged.len());
        damaged[at] = value;
        if let Ok(trace) = read(&damaged) {
            for p in &trace.passes {
                let experts = trace.model.layers[p.layer as usize].experts;
                prop_assert!(p.choices.iter().all(|c| c.expert < experts && c.weight >= 0.0));
            }
            prop_assert!(trace.model.map().is_ok());
        }
    }
}

#[test]
fn a_recording_that_was_killed_has_all_tokens_but_the_last() {
    let pass = |layer| Pass {
        layer,
        tokens: 1,
        decode: true,
        choices: vec![Choice { expert: layer, tokens: 1, weight: 0.5 }],
    };
    let passes: Vec<_> = (0..9).map(|i| pass(i % 3)).collect();
    let trace = read(&written(&model(3, 8), &passes, false)).unwrap();
    assert_eq!(trace.passes, passes[..6]);
}

#[test]
fn a_sink_that_is_full_is_told_at_the_end_and_does_not_stop_the_model() {
    struct Full(u32);
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += 1;
            if self.0 == 1 {
                Ok(bytes.len())
            } else {
                Err(io::ErrorKind::StorageFull.into())
            }
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut recorder = Recorder::new(Box::new(Full(0)), &model(2, 8)).unwrap();
    let demand = [Demand { expert: 1, tokens: 1, weight: 1.0 }];
    (0..6).for_each(|i| recorder.pass(i % 2, 1, true, &demand));
    assert_eq!(recorder.finish().unwrap_err().kind(), io::ErrorKind::StorageFull);
}

#[test]
fn another_version_and_another_file_are_named_for_what_they_are() {
    let mut newer = written(&model(2, 8), &[], true);
    newer[8] = 9;
    let e = read(&newer).unwrap_err().to_string();
    assert!(e.contains("version 9") && e.contains("version 1"), "{e}");
    let e = read(b"GGUF, by the look of it").unwrap_err().to_string();
    assert!(e.contains("not a trace") && e.contains("pinscope trace"), "{e}");
    let e = Trace::load(Path::new("/no/such.trace")).unwrap_err().to_string();
    assert!(e.contains("/no/such.trace"), "{e}");
}

#[test]
fn a_layout_of_the_traced_model_is_that_of_the_model() {
    let model = model(4, 8);
    let (map, again) = (model.map().unwrap(), model.map().unwrap());
    let known = ProfiledModel {
        id: model.id.unwrap(),
        name: model.name.clone(),
        layers: vec![1, 3, 5, 7],
        experts_per_layer: 8,
        top_k: 2,
    };
    assert_eq!(TracedModel::new(&map, &known), model);
    let bytes = Layout::full_bytes(&map) / 2;
    assert_eq!(Layout::new(&map, bytes), Layout::new(&again, bytes));
    assert_eq!(Layout::new(&map, bytes).unwrap().classes.len(), 2);
}

const CSV: &str = "# route_trace v1
# model=a.gguf arch=x n_layer=2 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=7
# layer=1 expert_bytes=200 dense_bytes=7
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,3,0.6,0,100
0,0,0,0,1,1,0.4,0,100
0,0,1,0,0,3,0.8,0,0
0,0,1,0,1,2,0.2,0,100
0,0,1,1,0,0,1.0,0,200
0,1,0,0,0,3,0.7,0,0
0,1,0,1,0,0,1.0,0,0
0,1,1,0,0,3,0.7,0,0
";

#[test]
fn a_trace_of_big_moe_on_edge_is_read_with_its_prompt_as_one_batch() {
    let trace = read(CSV.as_bytes()).unwrap();
    assert_eq!((trace.model.name.as_str(), trace.model.top_k), ("a.gguf", 2));
    let bytes: Vec<u64> = trace.model.layers.iter().map(TracedLayer::expert_bytes).collect();
    assert_eq!(bytes, [100, 200]);
    assert_eq!(trace.tokens(), (2, 2));
    let first = &trace.passes[0];
    let chosen: Vec<_> = first.choices.iter().map(|c| (c.expert, c.tokens)).collect();
    assert_eq!((first.tokens, first.decode), (2, false));
    assert_eq!(chosen, [(1, 1), (2, 1), (3, 2)]);
    assert!((first.choices[2].weight - 0.7).abs() < 1e-6);
    let passes: Vec<_> = trace.passes.iter().map(|p| (p.layer, p.tokens, p.decode)).collect();
    assert_eq!(passes, [(0, 2, false), (1, 1, false), (0, 1, true), (1, 1, true), (0, 1, true)]);
    assert!(trace.caveat.unwrap().contains("BigMoeOnEdge"));
}

#[test]
fn a_bad_row_of_big_moe_on_edge_is_named_by_its_line() {
    for (bad, words) in [
        ("0,0,0,9,0,1,0.5,0,0", "column 4"),
        ("0,0,0,0,0,4,0.5,0,0", "column 6"),
        ("0,0,0,0,0,1,x,0,0", "no weight"),
        ("0,0,0", "3 columns"),
    ] {
        let e = read(format!("{CSV}{bad}\n").as_bytes()).unwrap_err().to_string();
        assert!(e.contains("line 14") && e.contains(words), "{e}");
    }
}
