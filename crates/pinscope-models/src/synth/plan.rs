//! Which tensors and header values a shape has, as llama.cpp's loaders want them.

use super::fill::Content::{self, Constant, Directed, Gaussian};
use super::shape::{Arch, Latent, Shape};
use super::ExpertTypes;
use crate::error::Error;
use crate::gguf::{Header, TensorInfo, TensorType, Value};
use crate::tokens::{Vocabulary, CHAT_TEMPLATE};

/// Types that the files of [`ExpertTypes::Mixed`] go through.
const MIXED: [TensorType; 7] = [
    TensorType::Q4_K,
    TensorType::Q6_K,
    TensorType::Q8_0,
    TensorType::MXFP4,
    TensorType::F16,
    TensorType::Q5_K,
    TensorType::Q4_0,
];

/// llama.cpp's number for sigmoid routing.
const SIGMOID: u32 = 2;

/// All tensors of a shape in file order, each with what it holds.
///
/// # Errors
/// [`Error::Usage`] when an expert type's blocks do not fit the experts' rows.
pub fn tensors(shape: &Shape, experts: ExpertTypes) -> Result<Vec<(TensorInfo, Content)>, Error> {
    let mut plan = Plan { shape, experts, tensors: Vec::new() };
    let (embd, vocab) = (shape.embd, shape.vocab);
    let embedding = Directed { spread: 1.0, mean: shape.realism.mean, skew: 0.0 };
    plan.add("token_embd.weight", shape.embedding_type, &[embd, vocab], embedding);
    plan.matrix("output.weight", &[embd, vocab], 1.0);
    plan.ones("output_norm.weight", embd);
    for layer in 0..shape.layers {
        plan.layer(layer)?;
    }
    Ok(plan.tensors)
}

struct Plan<'a> {
    shape: &'a Shape,
    experts: ExpertTypes,
    tensors: Vec<(TensorInfo, Content)>,
}

impl Plan<'_> {
    fn add(&mut self, name: &str, ty: TensorType, ne: &[u64], content: Content) {
        let (name, ne) = (name.to_string(), ne.to_vec());
        self.tensors.push((TensorInfo { name, ty, ne }, content));
    }

    fn ones(&mut self, name: &str, len: u64) {
        self.add(name, TensorType::F32, &[len], Constant(1.0));
    }

    fn bias(&mut self, name: &str, ne: &[u64], std: f32) {
        self.add(name, TensorType::F32, ne, Gaussian(std));
    }

    /// A dense matrix that maps inputs of mean square 1 to outputs of root mean square `gain`.
    fn matrix(&mut self, name: &str, ne: &[u64], gain: f32) {
        let fits = |ty: TensorType| ne[0].is_multiple_of(ty.block() as u64);
        let ty = [self.shape.dense_type, TensorType::Q8_0, TensorType::F16]
            .into_iter()
            .find(|ty| fits(*ty))
            .expect("F16 fits every row");
        self.add(name, ty, ne, Gaussian(gain / (ne[0] as f32).sqrt()));
    }

    fn layer(&mut self, layer: u32) -> Result<(), Error> {
        let shape = self.shape;
        let blk = |name: &str| format!("blk.{layer}.{name}");
        let ffn_norm = match shape.arch {
            Arch::GptOss => "post_attention_norm.weight",
            _ => "ffn_norm.weight",
        };
        self.ones(&blk("attn_norm.weight"), shape.embd);
        self.ones(&blk(ffn_norm), shape.embd);
        match shape.latent {
            Some(latent) => self.latent_attention(&blk, latent),
            None => self.attention(&blk),
        }
        if layer < shape.dense_layers {
            self.dense_network(&blk, ["ffn_gate", "ffn_up", "ffn_down"], shape.dense_ff);
            return Ok(());
        }
        if shape.shared_experts > 0 {
            let ff = shape.expert_ff * shape.shared_experts;
            self.dense_network(&blk, ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"], ff);
        }
        self.router(&blk);
        self.expert_network(&blk, layer)
    }

    fn attention(&mut self, blk: &dyn Fn(&str) -> String) {
        let shape = self.shape;
        let (embd, queries) = (shape.embd, shape.heads * shape.head_dim);
        let keys = shape.kv_heads * shape.head_dim;
        self.matrix(&blk("attn_q.weight"), &[embd, queries], 1.0);
        self.matrix(&blk("attn_k.weight"), &[embd, keys], 1.0);
        self.matrix(&blk("attn_v.weight"), &[embd, keys], 1.0);
        let gain = shape.realism.attention;
        self.matrix(&blk("attn_output.weight"), &[queries, embd], gain);
        match shape.arch {
            Arch::Qwen3Moe => {
                self.ones(&blk("attn_q_norm.weight"), shape.head_dim);
                self.ones(&blk("attn_k_norm.weight"), shape.head_dim);
            }
            Arch::Olmoe => {
                self.ones(&blk("attn_q_norm.weight"), queries);
                self.ones(&blk("attn_k_norm.weight"), keys);
            }
            Arch::GptOss => {
                self.bias(&blk("attn_q.bias"), &[queries], 0.1);
                self.bias(&blk("attn_k.bias"), &[keys], 0.1);
                self.bias(&blk("attn_v.bias"), &[keys], 0.1);
                self.bias(&blk("attn_output.bias"), &[embd], 0.02);
                self.bias(&blk("attn_sinks.weight"), &[shape.heads], 1.0);
            }
            Arch::Llama | Arch::DeepSeek2 => (),
        }
    }

    fn latent_attention(&mut self, blk: &dyn Fn(&str) -> String, latent: Latent) {
        let Shape { embd, heads, .. } = *self.shape;
        let key = latent.rope + latent.nope;
        self.matrix(&blk("attn_q_a.weight"), &[embd, latent.q_rank], 1.0);
        self.ones(&blk("attn_q_a_norm.weight"), latent.q_rank);
        self.matrix(&blk("attn_q_b.weight"), &[latent.q_rank, heads * key], 1.0);
        let compressed = latent.kv_rank + latent.rope;
        self.matrix(&blk("attn_kv_a_mqa.weight"), &[embd, compressed], 1.0);
        self.ones(&blk("attn_kv_a_norm.weight"), latent.kv_rank);
        // Keys stay of unit size although this factor is stored transposed.
        let transposed = (latent.nope as f32 / latent.kv_rank as f32).sqrt();
        let k_b = [latent.nope, latent.kv_rank, heads];
        self.matrix(&blk("attn_k_b.weight"), &k_b, transposed);
        let v_b = [latent.kv_rank, latent.value, heads];
        self.matrix(&blk("attn_v_b.weight"), &v_b, 1.0);
        let gain = self.shape.realism.attention;
        self.matrix(&blk("attn_output.weight"), &[heads * latent.value, embd], gain);
    }

    fn dense_network(&mut self, blk: &dyn Fn(&str) -> String, names: [&str; 3], ff: u64) {
        let embd = self.shape.embd;
        let [gate, up, down] = names.map(|name| blk(&format!("{name}.weight")));
        self.matrix(&gate, &[embd, ff], 1.0);
        self.matrix(&up, &[embd, ff], 1.0);
        self.matrix(&down, &[ff, embd], self.shape.realism.experts);
    }

    fn router(&mut self, blk: &dyn Fn(&str) -> String) {
        let Shape { embd, experts, realism, .. } = *self.shape;
        let content = Directed {
            spread: realism.router / (embd as f32).sqrt(),
            mean: 0.0,
            skew: realism.skew / embd as f32,
        };
        let ne = [embd, experts];
        self.add(&blk("ffn_gate_inp.weight"), TensorType::F32, &ne, content);
        match self.shape.arch {
            Arch::GptOss => self.bias(&blk("ffn_gate_inp.bias"), &[experts], 0.1),
            Arch::DeepSeek2 => self.bias(&blk("exp_probs_b.bias"), &[experts], 0.02),
            _ => (),
        }
    }

    fn expert_network(&mut self, blk: &dyn Fn(&str) -> String, layer: u32) -> Result<(), Error> {
        let Shape { embd, experts, expert_ff, realism, .. } = *self.shape;
        // A weighted mean of k independent experts is about 1/sqrt(k) as long as one, and
        // silu(gate) * up is about half as long as up.
        let gain = realism.experts * 2.0;
        let inner = 1.0 / (embd as f32).sqrt();
        let outer = gain / (expert_ff as f32).sqrt();
        let matrices = if self.shape.fused {
            vec![("gate_up", embd, 2 * expert_ff, inner), ("down", expert_ff, embd, outer)]
        } else {
            vec![
                ("gate", embd, expert_ff, inner),
                ("up", embd, expert_ff, inner),
                ("down", expert_ff, embd, outer),
            ]
        };
        for (index, (name, row, rows, std)) in matrices.into_iter().enumerate() {
            let ty = self.expert_type(layer as usize * 3 + index, row)?;
            let ne = [row, rows, experts];
            self.add(&blk(&format!("ffn_{name}_exps.weight")), ty, &ne, Gaussian(std));
            if self.shape.arch == Arch::GptOss {
                self.bias(&blk(&format!("ffn_{name}_exps.bias")), &[rows, experts], 0.05);
            }
        }
        Ok(())
    }

    fn expert_type(&self, turn: usize, row: u64) -> Result<TensorType, Error> {
        let fits = |ty: &TensorType| row.is_multiple_of(ty.block() as u64);
        let ty = match self.experts {
            ExpertTypes::Shape => self.shape.expert_type,
            ExpertTypes::All(ty) => ty,
            ExpertTypes::Mixed => {
                let fitting: Vec<_> = MIXED.into_iter().filter(fits).collect();
                fitting[turn % fitting.len()]
            }
        };
        if fits(&ty) {
            return Ok(ty);
        }
        Err(Error::Usage(format!(
            "{} has expert rows of {row} elements, which {ty} cannot hold: it needs a multiple of {}; choose another --type",
            self.shape.name,
            ty.block()
        )))
    }
}

/// The key-value part of the header.
pub fn values(shape: &Shape) -> Header {
    let mut header = Header::default();
    let arch = shape.arch.name();
    header.set("general.architecture", &Value::Str(arch.into()));
    header.set("general.name", &Value::Str(format!("synthetic {}", shape.name)));
    let mut set = |key: &str, value: Value| header.set(&format!("{arch}.{key}"), &value);
    set("block_count", Value::U32(shape.layers));
    set("context_length", Value::U32(shape.context));
    set("embedding_length", Value::U32(shape.embd as u32));
    set("attention.layer_norm_rms_epsilon", Value::F32(1e-6));
    set("attention.head_count", Value::U32(shape.heads as u32));
    set("attention.head_count_kv", Value::U32(shape.kv_heads as u32));
    set("rope.freq_base", Value::F32(shape.rope_base));
    set("expert_count", Value::U32(shape.experts as u32));
    set("expert_used_count", Value::U32(shape.top_k as u32));
    match shape.arch {
        // These two keep the experts' length where others keep the dense layers'.
        Arch::Llama | Arch::Olmoe => {
            set("feed_forward_length", Value::U32(shape.expert_ff as u32));
        }
        _ => {
            set("feed_forward_length", Value::U32(shape.dense_ff as u32));
            set("expert_feed_forward_length", Value::U32(shape.expert_ff as u32));
        }
    }
    if let Some(latent) = shape.latent {
        set("attention.q_lora_rank", Value::U32(latent.q_rank as u32));
        set("attention.kv_lora_rank", Value::U32(latent.kv_rank as u32));
        let (key, value) = (latent.rope + latent.nope, latent.value);
        set("attention.key_length_mla", Value::U32(key as u32));
        set("attention.value_length_mla", Value::U32(value as u32));
        let compressed = latent.kv_rank + latent.rope;
        set("attention.key_length", Value::U32(compressed as u32));
        set("attention.value_length", Value::U32(latent.kv_rank as u32));
        set("rope.dimension_count", Value::U32(latent.rope as u32));
    } else {
        set("attention.key_length", Value::U32(shape.head_dim as u32));
        set("attention.value_length", Value::U32(shape.head_dim as u32));
    }
    if shape.arch == Arch::DeepSeek2 {
        set("leading_dense_block_count", Value::U32(shape.dense_layers));
        set("expert_shared_count", Value::U32(shape.shared_experts as u32));
        set("expert_group_count", Value::U32(shape.groups.0));
        set("expert_group_used_count", Value::U32(shape.groups.1));
        set("expert_gating_func", Value::U32(SIGMOID));
        set("expert_weights_norm", Value::Bool(true));
        set("expert_weights_scale", Value::F32(2.5));
    }
    if let Some(window) = shape.window {
        set("attention.sliding_window", Value::U32(window));
    }
    tokenizer(&mut header, shape.vocab as usize);
    header
}

fn tokenizer(header: &mut Header, size: usize) {
    let vocabulary = Vocabulary::new(size);
    let mut set = |key: &str, value: Value| header.set(&format!("tokenizer.{key}"), &value);
    set("ggml.model", Value::Str("gpt2".into()));
    set("ggml.pre", Value::Str("gpt-2".into()));
    set("ggml.tokens", Value::Strs(vocabulary.tokens));
    set("ggml.token_type", Value::I32s(vocabulary.types));
    set("ggml.merges", Value::Strs(vocabulary.merges));
    set("ggml.bos_token_id", Value::U32(vocabulary.end_of_text));
    set("ggml.eos_token_id", Value::U32(vocabulary.end_of_turn));
    set("ggml.add_bos_token", Value::Bool(false));
    set("chat_template", Value::Str(CHAT_TEMPLATE.into()));
}
