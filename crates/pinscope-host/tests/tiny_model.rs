//! The layer against a real model, a tiny one made on the spot.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use pinscope_host::{
    Context, ContextOptions, HostError, Logits, Model, ModelOptions, Sampler, SamplerOptions,
    TensorObserver, TensorView, Token,
};
use pinscope_models::synth::{self, Shape};

struct Tiny {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

fn tiny() -> Tiny {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    let shape = Shape::named("tiny-qwen3moe").unwrap();
    synth::write(&shape, &synth::Options::default(), &path, &mut |_, _| {}).unwrap();
    Tiny { _dir: dir, path }
}

fn load(path: &Path) -> Model {
    Model::load(path, ModelOptions::default()).unwrap()
}

fn options() -> ContextOptions {
    ContextOptions { n_ctx: 256, n_batch: 64, n_ubatch: 64, ..ContextOptions::default() }
}

const PROMPT: [Token; 5] = [5, 6, 7, 8, 9];

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|l| l.to_bits()).collect()
}

#[test]
fn text_survives_tokens_and_unknown_tokens_are_empty() {
    let tiny = tiny();
    let options = ModelOptions { vocab_only: true, ..ModelOptions::default() };
    let model = Model::load(&tiny.path, options).unwrap();
    let tokens = model.tokenize("The house, the sea.", false, false).unwrap();
    let text: Vec<u8> = tokens.iter().flat_map(|&t| model.piece(t, false)).collect();
    assert_eq!(String::from_utf8(text).unwrap().trim(), "The house, the sea.");
    assert!(model.tokenize("", false, false).unwrap().is_empty());
    for unknown in [-1, Token::MAX, model.n_vocab() as Token] {
        assert!(model.piece(unknown, true).is_empty());
        assert!(!model.is_eog(unknown));
    }
    assert_eq!(model.meta("general.architecture").as_deref(), Some("qwen3moe"));
    assert_eq!(model.meta("no.such.key"), None);
    assert!(matches!(Context::new(&model, self::options()), Err(HostError::Context { .. })));
}

#[test]
fn forgetting_and_repeating_gives_the_same_bits() {
    let tiny = tiny();
    let model = load(&tiny.path);
    let mut context = Context::new(&model, options()).unwrap();
    context.decode(&PROMPT, 0, Logits::All).unwrap();
    let all: Vec<_> = (0..PROMPT.len()).map(|i| bits(context.logits(i))).collect();
    assert_eq!(all[0].len(), model.n_vocab());
    assert!(context.logits(PROMPT.len()).is_empty());

    assert!(context.truncate(2));
    assert!(context.logits(0).is_empty());
    context.clear();
    context.decode(&PROMPT, 0, Logits::All).unwrap();
    let again: Vec<_> = (0..PROMPT.len()).map(|i| bits(context.logits(i))).collect();
    assert_eq!(all, again);
    assert_ne!(all[0], all[1]);

    // Only the last row, of the same values.
    context.truncate(4);
    context.decode(&PROMPT[4..], 4, Logits::Last).unwrap();
    let last = bits(context.logits(0));
    context.truncate(4);
    context.decode(&PROMPT[4..], 4, Logits::Last).unwrap();
    assert_eq!(last, bits(context.logits(0)));
}

#[test]
fn arguments_that_llama_cpp_would_assert_on_are_errors() {
    let tiny = tiny();
    let model = load(&tiny.path);
    let mut context = Context::new(&model, ContextOptions { max_outputs: 1, ..options() }).unwrap();
    let n_ctx = context.n_ctx();
    let decode = |c: &mut Context, tokens: &[Token], pos| c.decode(tokens, pos, Logits::Last);
    assert!(matches!(decode(&mut context, &[], 0), Err(HostError::Decode { .. })));
    assert!(matches!(decode(&mut context, &[1; 65], 0), Err(HostError::Decode { .. })));
    assert!(matches!(decode(&mut context, &[-1], 0), Err(HostError::Decode { .. })));
    let beyond = model.n_vocab() as Token;
    assert!(matches!(decode(&mut context, &[beyond], 0), Err(HostError::Decode { .. })));
    // A gap: nothing is at positions 1 and 2.
    decode(&mut context, &[1], 0).unwrap();
    assert!(matches!(decode(&mut context, &[1], 3), Err(HostError::Decode { .. })));
    assert!(matches!(decode(&mut context, &[1], n_ctx), Err(HostError::ContextFull { .. })));
    assert!(matches!(decode(&mut context, &[1], u32::MAX), Err(HostError::ContextFull { .. })));
    let many = context.decode(&[1, 2], 0, Logits::All);
    assert!(matches!(many, Err(HostError::Decode { .. })));
    // And the context still works, up to its last position.
    context.clear();
    for pos in (0..n_ctx).step_by(64) {
        context.decode(&[1; 64], pos, Logits::None).unwrap();
    }
    assert!(matches!(decode(&mut context, &[1], n_ctx), Err(HostError::ContextFull { .. })));
}

#[test]
fn a_raised_flag_stops_and_a_lowered_one_lets_go_on_with_the_same_bits() {
    let tiny = tiny();
    let model = load(&tiny.path);
    let stop = Arc::new(AtomicBool::new(false));
    let with_flag = ContextOptions { abort: Some(Arc::clone(&stop)), ..options() };
    let mut context = Context::new(&model, with_flag).unwrap();
    context.decode(&PROMPT, 0, Logits::Last).unwrap();
    let want = bits(context.logits(0));
    context.clear();
    stop.store(true, Ordering::Relaxed);
    let stopped = context.decode(&PROMPT, 0, Logits::Last);
    assert!(matches!(stopped, Err(HostError::Aborted)), "{stopped:?}");
    assert!(context.logits(0).is_empty());
    stop.store(false, Ordering::Relaxed);
    context.decode(&PROMPT, 0, Logits::Last).unwrap();
    assert_eq!(bits(context.logits(0)), want);
}

struct Router(Arc<Mutex<Vec<Vec<i32>>>>);

impl TensorObserver for Router {
    fn wants(&mut self, name: &str) -> bool {
        name == "ffn_moe_topk-0"
    }

    fn observe(&mut self, _: &str, tensor: &TensorView) {
        self.0.lock().unwrap().push(tensor.i32().unwrap());
    }
}

#[test]
fn an_observer_sees_the_router_choose_and_changes_nothing() {
    let tiny = tiny();
    let model = load(&tiny.path);
    let top_k: usize = model.meta("qwen3moe.expert_used_count").unwrap().parse().unwrap();
    let experts: i32 = model.meta("qwen3moe.expert_count").unwrap().parse().unwrap();
    let mut plain = Context::new(&model, options()).unwrap();
    plain.decode(&PROMPT, 0, Logits::Last).unwrap();

    let seen = Arc::new(Mutex::new(Vec::new()));
    let observer = Box::new(Router(Arc::clone(&seen)));
    let watched = ContextOptions { on_tensor: Some(observer), ..options() };
    let mut context = Context::new(&model, watched).unwrap();
    context.decode(&PROMPT, 0, Logits::Last).unwrap();
    assert_eq!(bits(context.logits(0)), bits(plain.logits(0)));
    drop(context);
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 1);
    for choice in seen[0].chunks(top_k) {
        let mut distinct = choice.to_vec();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), top_k, "{choice:?}");
        assert!(distinct.iter().all(|e| (0..experts).contains(e)));
    }
    assert_eq!(seen[0].len(), PROMPT.len() * top_k);
}

#[test]
fn sampling_follows_its_options() {
    let tiny = tiny();
    let model = load(&tiny.path);
    let mut context = Context::new(&model, options()).unwrap();
    context.decode(&PROMPT, 0, Logits::Last).unwrap();
    let draw = |o: &SamplerOptions| Sampler::new(&model, o).unwrap().sample(&context);

    let logits = context.logits(0);
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    let greedy = SamplerOptions { temp: 0.0, ..SamplerOptions::default() };
    // Several tokens may be the likeliest.
    let best = draw(&greedy);
    assert_eq!(logits[best as usize].to_bits(), most.to_bits());

    let hot = |seed| SamplerOptions {
        temp: 5.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed,
        ..SamplerOptions::default()
    };
    assert_eq!(draw(&hot(1)), draw(&hot(1)));
    assert!((0..20).any(|seed| draw(&hot(seed)) != draw(&hot(0))));

    // A heavy penalty on what greedy would choose.
    let mut sampler =
        Sampler::new(&model, &SamplerOptions { repeat_penalty: 1e6, ..greedy.clone() }).unwrap();
    sampler.accept(best);
    assert!(most > 0.0, "a penalty divides what is above 0");
    assert_ne!(sampler.sample(&context), best);
    for bad in [
        SamplerOptions { repeat_penalty: 0.0, ..SamplerOptions::default() },
        SamplerOptions { temp: f32::NAN, ..SamplerOptions::default() },
    ] {
        assert!(matches!(Sampler::new(&model, &bad), Err(HostError::Sampler { .. })));
    }
}

#[test]
fn an_answer_that_must_not_end_does_not() {
    let tiny = tiny();
    let model = load(&tiny.path);
    let mut context = Context::new(&model, options()).unwrap();
    context.decode(&PROMPT, 0, Logits::Last).unwrap();
    let endless = |seed| SamplerOptions {
        temp: 1000.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed,
        ignore_eog: true,
        ..SamplerOptions::default()
    };
    // Nearly uniform over the vocabulary: an end would be drawn at times.
    for seed in 0..2000 {
        let token = Sampler::new(&model, &endless(seed)).unwrap().sample(&context);
        assert!(!model.is_eog(token));
    }
}

#[test]
fn damaged_files_are_refused() {
    let tiny = tiny();
    let whole = std::fs::read(&tiny.path).unwrap();
    for len in [5, 24, 100, 3000, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&tiny.path, &whole[..len]).unwrap();
        match Model::load(&tiny.path, ModelOptions::default()) {
            Err(HostError::Load { reason, .. }) => assert!(reason.len() > 20, "{reason}"),
            other => panic!("{len} bytes: {other:?}"),
        }
    }
}

#[test]
fn loading_reports_progress_and_can_be_cancelled() {
    let tiny = tiny();
    let mut last = 0.0;
    let mut hear = |done| {
        last = done;
        true
    };
    let heard = ModelOptions { progress: Some(&mut hear), ..ModelOptions::default() };
    Model::load(&tiny.path, heard).unwrap();
    assert_eq!(last, 1.0);
    let mut refuse = |_| false;
    let cancelled = ModelOptions { progress: Some(&mut refuse), ..ModelOptions::default() };
    assert!(matches!(Model::load(&tiny.path, cancelled), Err(HostError::Cancelled)));
}
