//! A skeleton without a vocabulary against one with it.

use pinscope_host::{ContextOptions, Model, ModelOptions, Skeleton};
use pinscope_models::synth::{self, Shape};

#[test]
fn a_skeleton_costs_what_one_with_its_vocabulary_does_for_every_architecture() {
    let dir = tempfile::tempdir().unwrap();
    for name in Shape::names().into_iter().filter(|n| n.starts_with("tiny")) {
        let path = dir.path().join("tiny.gguf");
        let shape = Shape::named(name).unwrap();
        synth::write(&shape, &synth::Options::default(), &path, &mut |_, _| {}).unwrap();
        let whole = ModelOptions { no_alloc: true, ..ModelOptions::default() };
        let whole = Model::load(&path, whole).unwrap();
        let skeleton = Skeleton::load(&path).unwrap();
        assert!(skeleton.vocabulary_bytes > 0, "{name}: the vocabulary was read");
        assert_eq!(skeleton.model.n_ctx_train(), whole.n_ctx_train());
        for (n_ctx, n_ubatch) in [(512, 64), (2000, 512)] {
            let options = || ContextOptions { n_ctx, n_ubatch, ..ContextOptions::default() };
            let cost = skeleton.model.measure(&options()).unwrap();
            assert_eq!(cost, whole.measure(&options()).unwrap(), "{name}");
        }
    }
}
