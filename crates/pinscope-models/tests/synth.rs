//! Synthetic models as llama.cpp sees them.

use std::path::{Path, PathBuf};

use pinscope_host::{Context, ContextOptions, Logits, Model, ModelOptions};
use pinscope_models::gguf::TensorType;
use pinscope_models::synth::{write, ExpertTypes, Options, Shape};
use pinscope_models::{routing, TEXT};

fn make(dir: &Path, shape: &str, options: &Options) -> Vec<PathBuf> {
    let shape = Shape::named(shape).unwrap();
    write(&shape, options, &dir.join("model.gguf"), &mut |_, _| ()).unwrap()
}

/// The logits of every position of the first tokens of a text.
fn logits(path: &Path) -> Vec<Vec<f32>> {
    let model = Model::load(path, ModelOptions::default()).unwrap();
    let tokens = model.tokenize(&TEXT[..400], false, false).unwrap();
    let options = ContextOptions { n_ctx: 512, ..ContextOptions::default() };
    let mut context = Context::new(&model, options).unwrap();
    context.decode(&tokens, 0, Logits::All).unwrap();
    (0..tokens.len()).map(|i| context.logits(i).to_vec()).collect()
}

/// Finite, neither flat nor exploding, and different from position to position.
fn check_sane(path: &Path, what: &str) {
    let rows = logits(path);
    assert!(rows.len() > 60, "{what}");
    let mut winners = std::collections::HashSet::new();
    for row in &rows {
        assert!(row.iter().all(|v| v.is_finite()), "{what}: a logit is not finite");
        let mean = row.iter().sum::<f32>() / row.len() as f32;
        let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / row.len() as f32;
        assert!((0.2..5.0).contains(&variance.sqrt()), "{what}: spread {}", variance.sqrt());
        winners.insert((0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])));
    }
    assert!(winners.len() > 10, "{what}: only {} likeliest tokens", winners.len());
}

#[test]
fn every_tiny_shape_loads_and_computes_sane_logits() {
    for shape in Shape::names().into_iter().filter(|name| name.starts_with("tiny-")) {
        let dir = tempfile::tempdir().unwrap();
        let files = make(dir.path(), shape, &Options::default());
        check_sane(&files[0], shape);
    }
}

#[test]
fn every_expert_type_loads_and_computes_sane_logits() {
    let all = TensorType::WRITABLE.into_iter().map(ExpertTypes::All);
    for experts in all.chain([ExpertTypes::Mixed]) {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { experts, ..Options::default() };
        let files = make(dir.path(), "tiny-olmoe", &options);
        check_sane(&files[0], &format!("{experts:?}"));
    }
}

#[test]
fn mixed_files_change_type_between_layers_and_between_matrices() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { experts: ExpertTypes::Mixed, ..Options::default() };
    let files = make(dir.path(), "tiny-qwen3moe", &options);
    let tensors = pinscope_models::gguf::Header::open(&files[0]).unwrap().tensors();
    let ty = |name: &str| tensors.iter().find(|t| t.name == name).unwrap().ty;
    assert_ne!(ty("blk.0.ffn_gate_exps.weight"), ty("blk.0.ffn_down_exps.weight"));
    assert_ne!(ty("blk.0.ffn_gate_exps.weight"), ty("blk.1.ffn_gate_exps.weight"));
}

#[test]
fn a_model_in_parts_computes_what_the_whole_one_computes() {
    let dir = tempfile::tempdir().unwrap();
    let whole = make(dir.path(), "tiny-qwen3moe", &Options::default());
    let parts = make(dir.path(), "tiny-qwen3moe", &Options { parts: 3, ..Options::default() });
    assert_eq!(parts.len(), 3);
    assert!(parts[2].ends_with("model-00003-of-00003.gguf"));
    assert_eq!(logits(&whole[0]), logits(&parts[0]));
}

#[test]
fn the_seed_decides_the_bytes() {
    let bytes = |seed| {
        let dir = tempfile::tempdir().unwrap();
        let files = make(dir.path(), "tiny-mixtral", &Options { seed, ..Options::default() });
        std::fs::read(&files[0]).unwrap()
    };
    let first = bytes(1);
    assert!(first == bytes(1), "the same seed gave other bytes");
    assert!(first != bytes(2), "another seed gave the same bytes");
}

#[test]
fn cut_published_shapes_load_as_their_architecture() {
    let dir = tempfile::tempdir().unwrap();
    for (name, layers, arch) in [("gpt-oss-20b", 1, "gpt-oss"), ("qwen3-30b-a3b", 1, "qwen3moe")] {
        let shape = Shape::named(name).unwrap().cut_to(layers).unwrap();
        // The vocabulary is most of such a file and plays no part here.
        let shape = Shape { vocab: 512, ..shape };
        let out = dir.path().join("cut.gguf");
        write(&shape, &Options::default(), &out, &mut |_, _| ()).unwrap();
        let model = Model::load(&out, ModelOptions::default()).unwrap();
        assert_eq!(model.meta("general.architecture").as_deref(), Some(arch));
        assert_eq!(model.n_layer(), 1);
        check_sane(&out, name);
    }
}

#[test]
fn a_type_that_does_not_fit_the_experts_is_refused_with_the_needed_multiple() {
    let dir = tempfile::tempdir().unwrap();
    let shape = Shape::named("tiny-gpt-oss").unwrap();
    let experts = ExpertTypes::All(TensorType::Q4_K);
    let options = Options { experts, ..Options::default() };
    let error = write(&shape, &options, &dir.path().join("m.gguf"), &mut |_, _| ()).unwrap_err();
    assert!(error.to_string().contains("multiple of 256"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn routing_of_a_synthetic_model_is_skewed_and_predictable() {
    let dir = tempfile::tempdir().unwrap();
    let files = make(dir.path(), "tiny-qwen3moe", &Options::default());
    let report = routing::measure(&files[0], TEXT, 256, &mut |_, _| ()).unwrap();
    assert_eq!((report.tokens, report.experts, report.top_k, report.layers), (256, 32, 4, 4));
    let figures = report.overall;
    // Chance would be 4/32 for the first three.
    assert!(figures.previous_token_overlap > 0.2, "{figures:?}");
    assert!((0.25..0.7).contains(&figures.top_k_share), "{figures:?}");
    assert!(figures.next_layer_accuracy.is_some_and(|a| a > 0.65), "{figures:?}");
    assert!(figures.top_50_percent_share < 1.0, "{figures:?}");
}

#[test]
fn routing_of_a_model_in_parts_and_with_grouped_routers_is_measured_too() {
    let dir = tempfile::tempdir().unwrap();
    let files = make(dir.path(), "tiny-qwen3moe", &Options { parts: 2, ..Options::default() });
    let report = routing::measure(&files[0], TEXT, 64, &mut |_, _| ()).unwrap();
    assert!(report.overall.next_layer_accuracy.is_some());
    let files = make(dir.path(), "tiny-deepseek2", &Options::default());
    let report = routing::measure(&files[0], TEXT, 64, &mut |_, _| ()).unwrap();
    assert_eq!(report.layers, 3);
    assert_eq!(report.overall.next_layer_accuracy, None);
}

#[test]
fn more_experts_make_the_file_larger_by_their_size_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let size = |experts: u64| {
        let shape = Shape::named("tiny-qwen3moe").unwrap().with_experts(experts).unwrap();
        let path = dir.path().join(format!("{experts}.gguf"));
        write(&shape, &Options::default(), &path, &mut |_, _| ()).unwrap();
        std::fs::metadata(path).unwrap().len() as i64
    };
    let (few, some, many) = (size(16), size(48), size(80));
    // Q4_K takes 144 bytes for 256 weights, the router 4 for each.
    let expert = 3 * 256 * 256 / 256 * 144 + 256 * 4;
    assert!((some - few - 4 * 32 * expert).abs() < 4096, "{}", some - few);
    assert!((many - some - 4 * 32 * expert).abs() < 4096);
    for (shape, wrong) in [("tiny-qwen3moe", 3), ("tiny-qwen3moe", 513), ("tiny-deepseek2", 18)] {
        let error = Shape::named(shape).unwrap().with_experts(wrong).unwrap_err();
        assert!(error.to_string().contains(shape), "{error}");
    }
}
