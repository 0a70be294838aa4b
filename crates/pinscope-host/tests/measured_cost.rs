//! What a context is measured to cost against what it takes. The memory of the
//! process is compared, so this is the only test in its process.

use pinscope_host::{Context, ContextOptions, Logits, Model, ModelOptions, Skeleton};
use pinscope_models::synth::{self, Shape};

#[test]
fn the_measured_cost_is_what_a_real_context_takes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    let shape = Shape::named("tiny-qwen3moe").unwrap();
    synth::write(&shape, &synth::Options::default(), &path, &mut |_, _| {}).unwrap();
    let options = || ContextOptions { n_ctx: 32768, ..ContextOptions::default() };

    let model = Model::load(&path, ModelOptions::default()).unwrap();
    let before = data_bytes();
    let mut context = Context::new(&model, options()).unwrap();
    context.decode(&[1; 512], 0, Logits::All).unwrap();
    let real = data_bytes() - before;

    let skeleton = Skeleton::load(&path).unwrap();
    let cost = skeleton.model.measure(&options()).unwrap();
    let measured = cost.kv + cost.compute + cost.output;
    assert!(measured > 64 << 20, "{measured} is too little to compare");
    // Besides its buffers a context has tables for graphs: 25 MB of addresses.
    let tables = real.checked_sub(measured).expect("less is taken than measured");
    assert!(tables < 32 << 20, "{cost:?}: {measured} and {real}");

    let one_row = ContextOptions { max_outputs: 1, ..options() };
    let less = skeleton.model.measure(&one_row).unwrap();
    assert_eq!((less.kv, less.output), (cost.kv, model.n_vocab() as u64 * 4));
    assert!(less.compute <= cost.compute);
}

/// Private memory of this process, touched or not, bytes.
fn data_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmData:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}
