//! What llama.cpp does around the experts keeps working, and fails cleanly.

mod common;

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use common::{engine, model, one_at_a_time, run, run_again_if, run_with};
use pinscope::arena::Arena;
use pinscope::layout::Layout;
use pinscope::policy::PolicyKind;
use pinscope::reader::faulty::{FaultPlan, FaultyReader};
use pinscope::reader::{open_reader, ModelFiles, ReaderKind, ReaderOptions};
use pinscope::residency::Residency;
use pinscope_ggml::{read_map, Engine};
use pinscope_host::{ContextOptions, TensorObserver, TensorView};
use pinscope_models::synth::ExpertTypes;

/// Writes a LoRA adapter of rank 2 for the tensors named, with values that
/// change the result without dwarfing it.
fn lora(model: &Path, tensors: &[&str], out: &Path) {
    const RANK: u64 = 2;
    let map = read_map(model).unwrap();
    let text = |s: &str| [&(s.len() as u64).to_le_bytes(), s.as_bytes()].concat();
    let key = |k: &str, v: &str| [text(k), 8u32.to_le_bytes().to_vec(), text(v)].concat();
    let mut head = vec![
        key("general.type", "adapter"),
        key("general.architecture", "qwen3moe"),
        key("adapter.type", "lora"),
        [text("adapter.lora.alpha"), 6u32.to_le_bytes().into(), 4f32.to_le_bytes().into()].concat(),
    ];
    let values = head.len() as u64;
    let mut data: Vec<u8> = Vec::new();
    for name in tensors {
        let [n_in, n_out, experts, _] = map.tensor(name).unwrap().ne;
        for (suffix, ne) in [("lora_a", [n_in, RANK, experts]), ("lora_b", [RANK, n_out, experts])]
        {
            let dims: Vec<u8> = ne.iter().flat_map(|n| n.to_le_bytes()).collect();
            let offset = (data.len() as u64).to_le_bytes();
            head.push(text(&format!("{name}.{suffix}")));
            head.push([&3u32.to_le_bytes(), &dims[..], &0u32.to_le_bytes(), &offset].concat());
            let floats =
                (0..ne.iter().product()).map(|i: u64| ((i * 37 % 101) as f32 - 50.0) / 800.0);
            data.extend(floats.flat_map(f32::to_le_bytes));
            data.resize(data.len().next_multiple_of(32), 0);
        }
    }
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend((tensors.len() as u64 * 2).to_le_bytes());
    file.extend(values.to_le_bytes());
    file.extend(head.concat());
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    std::fs::write(out, file).unwrap();
}

#[test]
fn a_lora_adapter_on_experts_gives_the_same_bits_under_a_budget() {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), "tiny-qwen3moe", ExpertTypes::Shape);
    let adapter = dir.path().join("lora.gguf");
    lora(&path, &["blk.0.ffn_gate_exps.weight", "blk.1.ffn_down_exps.weight"], &adapter);
    let plain = run(&path, 1).unwrap();
    let reference = run_with(&path, ContextOptions::default(), Some(&adapter)).unwrap();
    assert_ne!(plain, reference, "the adapter does something");
    for permille in [1000, 250, 0] {
        let engine = engine(&path, permille, ReaderKind::Auto);
        let got = run_with(&path, ContextOptions::default(), Some(&adapter))
            .unwrap_or_else(|e| panic!("{e}: {:?}", engine.take_error()));
        assert_eq!(got, reference, "{permille} permille");
    }
}

/// Makes llama.cpp compute the graph piece by piece and look at the results.
struct Looker(Arc<std::sync::Mutex<Vec<f32>>>);

impl TensorObserver for Looker {
    fn wants(&mut self, name: &str) -> bool {
        ["ffn_moe_up", "ffn_moe_swiglu", "ffn_moe_down"].iter().any(|n| name.starts_with(n))
    }

    fn observe(&mut self, _: &str, t: &TensorView) {
        self.0.lock().unwrap().extend(t.f32().unwrap().iter().step_by(97));
    }
}

#[test]
fn an_observer_of_intermediate_results_sees_the_same_bits_under_a_budget() {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), "tiny-qwen3moe", ExpertTypes::Shape);
    let look = || {
        let seen = Arc::default();
        let on_tensor: Box<dyn TensorObserver> = Box::new(Looker(Arc::clone(&seen)));
        let options = ContextOptions { on_tensor: Some(on_tensor), ..ContextOptions::default() };
        let outcome = run_with(&path, options, None).unwrap();
        let seen = seen.lock().unwrap().clone();
        (outcome, seen)
    };
    let reference = look();
    assert!(!reference.1.is_empty());
    let _engine = engine(&path, 250, ReaderKind::Auto);
    assert!(look() == reference);
}

fn faulty_engine(path: &Path, plan: FaultPlan) -> Engine {
    let map = Arc::new(read_map(path).unwrap());
    let layout = Layout::new(&map, Layout::full_bytes(&map) / 4).unwrap();
    let arena = Arc::new(Arena::new(layout.used() as usize).unwrap());
    let files = Arc::new(ModelFiles::open(map.files()).unwrap());
    let options = ReaderOptions { chunk: 16 << 10, ..ReaderOptions::default() };
    let (reader, _) =
        open_reader(Arc::clone(&files), Arc::clone(&arena), ReaderKind::Auto, options).unwrap();
    let reader = Box::new(FaultyReader::new(reader, plan));
    let residency =
        Residency::with_reader(Arc::clone(&map), layout, arena, reader, PolicyKind::default());
    Engine::with_residency(map, files, residency, Vec::new()).unwrap()
}

#[test]
fn reads_that_are_late_reordered_and_repeated_change_no_bit_with_any_threads() {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    for (shape, types) in [
        ("tiny-qwen3moe", ExpertTypes::Mixed),
        ("tiny-gpt-oss", ExpertTypes::Shape),
        ("tiny-fused", ExpertTypes::Shape),
    ] {
        let path = model(dir.path(), shape, types);
        let reference = run(&path, 1).unwrap();
        for (seed, threads) in [1, 2, 8].into_iter().enumerate() {
            let plan =
                FaultPlan { seed: seed as u64, delay: 0.3, fail: 0.0, retry: 0.2, reorder: true };
            let _engine = faulty_engine(&path, plan);
            assert_eq!(run(&path, threads).unwrap(), reference, "{shape}, {threads} threads");
        }
    }
}

#[test]
fn batches_that_fail_and_are_computed_again_change_no_bit() {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), "tiny-qwen3moe", ExpertTypes::Mixed);
    let reference = run(&path, 1).unwrap();
    for (seed, threads) in [1, 2, 8].into_iter().enumerate() {
        let plan =
            FaultPlan { seed: seed as u64, delay: 0.3, fail: 0.003, retry: 0.1, reorder: true };
        let engine = faulty_engine(&path, plan);
        let failures = Cell::new(0);
        let again = || {
            failures.set(failures.get() + 1);
            engine.take_error().is_some() && failures.get() < 1000
        };
        let options = ContextOptions { threads, threads_batch: threads, ..Default::default() };
        assert_eq!(run_again_if(&again, &path, options, None).unwrap(), reference, "seed {seed}");
        assert!(failures.get() > 0, "seed {seed}: nothing failed");
    }
}

#[test]
fn a_read_error_ends_the_decode_with_a_reason_that_is_given_once() {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), "tiny-qwen3moe", ExpertTypes::Shape);
    let plan = FaultPlan { seed: 7, delay: 0.1, fail: 0.01, retry: 0.0, reorder: true };
    let engine = faulty_engine(&path, plan);
    assert!(run(&path, 1).is_err(), "one read of a hundred fails, so a run of thousands does");
    let reason = engine.take_error().expect("the engine says why");
    assert!(reason.contains("Input/output error") && reason.contains("check the disk"), "{reason}");
    assert!(engine.take_error().is_none());
}

#[test]
fn a_file_that_changes_under_a_run_ends_it_with_a_reason() {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), "tiny-qwen3moe", ExpertTypes::Shape);
    let engine = engine(&path, 0, ReaderKind::Auto);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, b"GGUF", 0).unwrap();
    let failed = run(&path, 1);
    assert!(failed.is_err());
    let reason = engine.take_error().expect("the engine says why");
    assert!(reason.contains("changed"), "{reason}");
}

#[test]
fn without_an_engine_llama_cpp_runs_as_if_the_device_were_not_there() {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), "tiny-qwen3moe", ExpertTypes::Shape);
    let before = run(&path, 1).unwrap();
    drop(engine(&path, 500, ReaderKind::Auto));
    assert_eq!(run(&path, 1).unwrap(), before);
}
