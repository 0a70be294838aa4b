//! The shapes that can be made: published models and tiny ones for tests.

use crate::error::Error;
use crate::gguf::TensorType;

/// What sets one llama.cpp architecture apart from the others here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// Softmax routing, normalised queries and keys.
    Qwen3Moe,
    /// Biases everywhere, attention sinks, sliding windows, softmax over the chosen.
    GptOss,
    /// Mixtral.
    Llama,
    /// Latent attention, shared experts, grouped sigmoid routing, dense first layers.
    DeepSeek2,
    /// Softmax routing, weights not normalised, full-width norms of queries and keys.
    Olmoe,
}

impl Arch {
    /// llama.cpp's name, also the prefix of its keys.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qwen3Moe => "qwen3moe",
            Self::GptOss => "gpt-oss",
            Self::Llama => "llama",
            Self::DeepSeek2 => "deepseek2",
            Self::Olmoe => "olmoe",
        }
    }
}

/// Sizes of multi-head latent attention.
#[derive(Clone, Copy, Debug)]
pub struct Latent {
    /// Rank of the compressed queries.
    pub q_rank: u64,
    /// Rank of the compressed keys and values.
    pub kv_rank: u64,
    /// Rotated part of a key.
    pub rope: u64,
    /// Unrotated part of a key.
    pub nope: u64,
    /// Length of a value.
    pub value: u64,
}

/// How strongly the parts of a layer act; see [`super::write`] for what they do to routing.
#[derive(Clone, Copy, Debug)]
pub struct Realism {
    /// Length of the direction that all token embeddings share, against their own.
    pub mean: f32,
    /// Spread of the experts' popularity: of their weights along that direction.
    pub skew: f32,
    /// Spread of router logits that depends on the token.
    pub router: f32,
    /// Size of the attention's output against the token embedding.
    pub attention: f32,
    /// Size of the experts' output against the token embedding.
    pub experts: f32,
}

/// Everything that fixes the tensors of a model, apart from random numbers.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The name on the command line.
    pub name: &'static str,
    /// The architecture.
    pub arch: Arch,
    /// Number of layers.
    pub layers: u32,
    /// Leading layers without experts.
    pub dense_layers: u32,
    /// Length of a hidden state.
    pub embd: u64,
    /// Attention heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Length of one head.
    pub head_dim: u64,
    /// Tokens in the vocabulary.
    pub vocab: u64,
    /// Experts in a layer.
    pub experts: u64,
    /// Experts that one token uses.
    pub top_k: u64,
    /// Hidden length of one expert.
    pub expert_ff: u64,
    /// Hidden length of a dense layer's network.
    pub dense_ff: u64,
    /// Experts that every token uses besides the chosen ones.
    pub shared_experts: u64,
    /// Expert groups, and how many of them a token may use.
    pub groups: (u32, u32),
    /// Longest context that the file claims.
    pub context: u32,
    /// Sliding window of every other layer.
    pub window: Option<u32>,
    /// Latent attention, where the architecture has it.
    pub latent: Option<Latent>,
    /// Base of the rotary embedding.
    pub rope_base: f32,
    /// Gate and up projection in one tensor.
    pub fused: bool,
    /// Type of the experts unless the caller chooses.
    pub expert_type: TensorType,
    /// Type of the other matrices (rows that do not fit it fall back to Q8_0).
    pub dense_type: TensorType,
    /// Type of the token embeddings.
    pub embedding_type: TensorType,
    /// Calibration of the routing.
    pub realism: Realism,
}

const REALISM: Realism =
    Realism { mean: 0.61, skew: 2.45, router: 2.0, attention: 0.34, experts: 0.28 };

const QWEN3_30B_A3B: Shape = Shape {
    name: "qwen3-30b-a3b",
    arch: Arch::Qwen3Moe,
    layers: 48,
    dense_layers: 0,
    embd: 2048,
    heads: 32,
    kv_heads: 4,
    head_dim: 128,
    vocab: 151_936,
    experts: 128,
    top_k: 8,
    expert_ff: 768,
    dense_ff: 6144,
    shared_experts: 0,
    groups: (0, 0),
    context: 32_768,
    window: None,
    latent: None,
    rope_base: 1e6,
    fused: false,
    expert_type: TensorType::Q4_K,
    dense_type: TensorType::Q4_K,
    embedding_type: TensorType::F32,
    realism: REALISM,
};

const GPT_OSS_20B: Shape = Shape {
    name: "gpt-oss-20b",
    arch: Arch::GptOss,
    layers: 24,
    embd: 2880,
    heads: 64,
    kv_heads: 8,
    head_dim: 64,
    vocab: 201_088,
    experts: 32,
    top_k: 4,
    expert_ff: 2880,
    dense_ff: 2880,
    context: 131_072,
    window: Some(128),
    rope_base: 150_000.0,
    expert_type: TensorType::MXFP4,
    dense_type: TensorType::Q8_0,
    embedding_type: TensorType::F16,
    ..QWEN3_30B_A3B
};

const MIXTRAL_8X7B: Shape = Shape {
    name: "mixtral-8x7b",
    arch: Arch::Llama,
    layers: 32,
    embd: 4096,
    heads: 32,
    kv_heads: 8,
    vocab: 32_000,
    experts: 8,
    top_k: 2,
    expert_ff: 14_336,
    dense_ff: 14_336,
    embedding_type: TensorType::F16,
    ..QWEN3_30B_A3B
};

const DEEPSEEK_V3: Shape = Shape {
    name: "deepseek-v3",
    arch: Arch::DeepSeek2,
    layers: 61,
    dense_layers: 3,
    embd: 7168,
    heads: 128,
    kv_heads: 1,
    vocab: 129_280,
    experts: 256,
    expert_ff: 2048,
    dense_ff: 18_432,
    shared_experts: 1,
    groups: (8, 4),
    context: 163_840,
    latent: Some(Latent { q_rank: 1536, kv_rank: 512, rope: 64, nope: 128, value: 128 }),
    rope_base: 10_000.0,
    embedding_type: TensorType::F16,
    ..QWEN3_30B_A3B
};

/// Few and small experts; the vocabulary still splits English into word parts.
const TINY_QWEN3MOE: Shape = Shape {
    name: "tiny-qwen3moe",
    layers: 4,
    embd: 256,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    vocab: 512,
    experts: 32,
    top_k: 4,
    expert_ff: 256,
    dense_ff: 512,
    context: 4096,
    dense_type: TensorType::Q8_0,
    ..QWEN3_30B_A3B
};

/// Large enough to measure what grows with the number of experts or the
/// context, small enough for a disk to hold it several times.
const SMALL_QWEN3MOE: Shape = Shape {
    name: "small-qwen3moe",
    embd: 1024,
    heads: 8,
    head_dim: 128,
    experts: 128,
    top_k: 8,
    context: 32_768,
    ..TINY_QWEN3MOE
};

const TINY_DEEPSEEK2: Shape = Shape {
    name: "tiny-deepseek2",
    arch: Arch::DeepSeek2,
    dense_layers: 1,
    kv_heads: 1,
    shared_experts: 1,
    groups: (4, 2),
    latent: Some(Latent { q_rank: 64, kv_rank: 64, rope: 32, nope: 32, value: 32 }),
    ..TINY_QWEN3MOE
};

/// All shapes, in the order in which help texts name them.
const ALL: [Shape; 12] = [
    QWEN3_30B_A3B,
    GPT_OSS_20B,
    Shape { name: "gpt-oss-120b", layers: 36, experts: 128, ..GPT_OSS_20B },
    MIXTRAL_8X7B,
    DEEPSEEK_V3,
    SMALL_QWEN3MOE,
    TINY_QWEN3MOE,
    Shape {
        name: "tiny-gpt-oss",
        // Expert sizes that are no multiple of 256 elements or 4096 bytes, as in the real one.
        embd: 288,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        layers: 4,
        vocab: 512,
        experts: 16,
        expert_ff: 288,
        dense_ff: 288,
        context: 4096,
        window: Some(32),
        embedding_type: TensorType::F32,
        ..GPT_OSS_20B
    },
    Shape {
        name: "tiny-mixtral",
        arch: Arch::Llama,
        experts: 8,
        top_k: 2,
        expert_ff: 512,
        ..TINY_QWEN3MOE
    },
    TINY_DEEPSEEK2,
    Shape { name: "tiny-olmoe", arch: Arch::Olmoe, kv_heads: 4, experts: 16, ..TINY_QWEN3MOE },
    Shape { name: "tiny-fused", fused: true, ..TINY_DEEPSEEK2 },
];

impl Shape {
    /// Names of all shapes.
    pub fn names() -> Vec<&'static str> {
        ALL.iter().map(|s| s.name).collect()
    }

    /// The shape of that name.
    ///
    /// # Errors
    /// [`Error::Usage`] with all names when there is none.
    pub fn named(name: &str) -> Result<Self, Error> {
        ALL.into_iter().find(|s| s.name == name).ok_or_else(|| {
            Error::Usage(format!(
                "no shape is called '{name}'; choose one of: {}",
                Self::names().join(", ")
            ))
        })
    }

    /// The same model with only its first `layers` layers.
    ///
    /// # Errors
    /// [`Error::Usage`] when that leaves no layer with experts, is more than the shape has,
    /// or is a number that llama.cpp takes for another model.
    pub fn cut_to(mut self, layers: u32) -> Result<Self, Error> {
        if layers <= self.dense_layers || layers > self.layers {
            return Err(Error::Usage(format!(
                "{} can be cut to {} to {} layers, not {layers}",
                self.name,
                self.dense_layers + 1,
                self.layers
            )));
        }
        if self.arch == Arch::DeepSeek2 && matches!(layers, 26 | 27) {
            return Err(Error::Usage(format!(
                "llama.cpp takes a {} of {layers} layers for DeepSeek-V2-Lite; choose another number",
                self.arch.name()
            )));
        }
        self.layers = layers;
        Ok(self)
    }

    /// The same model with another number of experts in a layer.
    ///
    /// # Errors
    /// [`Error::Usage`] when a token would use more than there are, the groups
    /// of experts would not be alike, or llama.cpp takes no more than 512.
    pub fn with_experts(mut self, experts: u64) -> Result<Self, Error> {
        let groups = u64::from(self.groups.0.max(1));
        if experts < self.top_k || experts > 512 || !experts.is_multiple_of(groups) {
            return Err(Error::Usage(format!(
                "{} can have {} to 512 experts in multiples of {groups}, not {experts}",
                self.name, self.top_k
            )));
        }
        self.experts = experts;
        Ok(self)
    }
}
