//! Where the bytes of every expert are.
//!
//! An [`ExpertMap`] is built from the tensor table of a GGUF file (or of the
//! parts of a split model). This module knows names, shapes and byte ranges,
//! and nothing of ggml: whoever reads the header (`pinscope-ggml`) hands the
//! table in as [`TensorInfo`]s. Everything that a header may get wrong is
//! checked here, before the first byte of data is read.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use crate::policy::ExpertId;

/// One tensor as the file header describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// GGUF name, for example `blk.3.ffn_gate_exps.weight`.
    pub name: String,
    /// Index into the list of files.
    pub file: u16,
    /// Absolute position in that file, bytes.
    pub offset: u64,
    /// Size, bytes.
    pub size: u64,
    /// Elements in each dimension, fastest first; the third one of an expert
    /// tensor counts experts.
    pub ne: [u64; 4],
}

/// One model file, as it was when the header was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFile {
    /// Path, as given or as derived for the parts of a split model.
    pub path: PathBuf,
    /// Length, bytes.
    pub len: u64,
    /// Bytes before the first tensor: what says which model this is.
    pub header_len: u64,
}

/// What a weight matrix of an expert is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Gate and up fused in one tensor (`ffn_gate_up_exps`).
    GateUp,
    /// `ffn_gate_exps`.
    Gate,
    /// `ffn_up_exps`.
    Up,
    /// `ffn_down_exps`; needed last.
    Down,
}

impl Role {
    /// Layer and role of an expert tensor's name, `None` for any other tensor.
    ///
    /// Only the exact weight names count: a LoRA adapter's
    /// `blk.0.ffn_up_exps.weight.lora_a` or an expert bias is not file-backed
    /// expert data.
    fn parse(name: &str) -> Option<(usize, Role)> {
        let (layer, tensor) = name.strip_prefix("blk.")?.split_once('.')?;
        let role = match tensor {
            "ffn_gate_up_exps.weight" => Role::GateUp,
            "ffn_gate_exps.weight" => Role::Gate,
            "ffn_up_exps.weight" => Role::Up,
            "ffn_down_exps.weight" => Role::Down,
            _ => return None,
        };
        Some((layer.parse().ok()?, role))
    }
}

/// One weight matrix of all experts of a layer: expert `e` has the bytes
/// `offset + e * bytes .. offset + (e + 1) * bytes` of `file`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// What it is for.
    pub role: Role,
    /// Index into [`ExpertMap::files`].
    pub file: u16,
    /// Position of expert 0, bytes.
    pub offset: u64,
    /// Size for one expert, bytes.
    pub bytes: u64,
    /// Inputs and outputs of one expert's matrix.
    pub ne: [u64; 2],
}

/// The experts of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerExperts {
    /// Number of the layer in the model (`blk.N`).
    pub index: usize,
    /// How many experts it has.
    pub experts: u32,
    /// Their matrices, in the order in which arithmetic needs them.
    pub parts: Vec<Part>,
}

impl LayerExperts {
    /// Size of one expert with all its parts, bytes.
    pub fn expert_bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes).sum()
    }
}

/// Where an expert tensor stands: position in [`ExpertMap::layers`], and in
/// that layer's [`LayerExperts::parts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartRef {
    /// Position in [`ExpertMap::layers`].
    pub layer: usize,
    /// Position in [`LayerExperts::parts`].
    pub part: usize,
}

/// What kept an [`ExpertMap`] from being built.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum MapError {
    #[error(
        "{path} has no expert tensors: it is a dense model, for which PinScope has nothing to do. \
         Run it with llama.cpp, or give PinScope a Mixture-of-Experts model"
    )]
    Dense { path: String },
    #[error(
        "{path} is truncated: its header places {tensor} at bytes {offset} to {end}, but the file \
         ends at {len}. Download it again"
    )]
    Truncated { path: String, tensor: String, offset: u64, end: u64, len: u64 },
    #[error(
        "{path} contradicts itself: {tensor} has {size} bytes, which {experts} experts do not \
         divide evenly. The file is damaged or was made by a broken converter"
    )]
    Uneven { path: String, tensor: String, size: u64, experts: u64 },
    #[error(
        "{path} contradicts itself: layer {layer} has {found} experts in {tensor} and {expected} \
         in its other tensors. The file is damaged or was made by a broken converter"
    )]
    CountMismatch { path: String, layer: usize, tensor: String, found: u64, expected: u64 },
    #[error(
        "{path} says that a token uses {top_k} experts, but layer {layer} has only {experts}. \
         The file is damaged or was made by a broken converter"
    )]
    TopK { path: String, top_k: u32, layer: usize, experts: u32 },
    #[error(
        "{path} has two tensors named {tensor}. The file is damaged, or a part is given twice"
    )]
    Duplicate { path: String, tensor: String },
}

/// Files, tensors and experts of one model.
#[derive(Debug, Clone)]
pub struct ExpertMap {
    files: Vec<ModelFile>,
    layers: Vec<LayerExperts>,
    top_k: u32,
    tensors: HashMap<String, TensorInfo>,
    expert_tensors: HashMap<String, PartRef>,
    dense_bytes: u64,
}

impl ExpertMap {
    /// Builds the map of a model whose header lists `tensors` in `files`;
    /// `top_k` experts serve a token.
    ///
    /// # Errors
    /// A dense model, a tensor beyond the end of its file, and headers that
    /// contradict themselves; see [`MapError`].
    pub fn new(
        files: Vec<ModelFile>,
        tensors: Vec<TensorInfo>,
        top_k: u32,
    ) -> Result<Self, MapError> {
        let path = |file: u16| files[usize::from(file)].path.display().to_string();
        let mut layers: BTreeMap<usize, LayerExperts> = BTreeMap::new();
        let mut roles = HashMap::new();
        let mut dense_bytes = 0;
        let mut by_name = HashMap::with_capacity(tensors.len());
        for t in tensors {
            let len = files[usize::from(t.file)].len;
            let end = t.offset.saturating_add(t.size);
            if end > len {
                return Err(MapError::Truncated {
                    path: path(t.file),
                    tensor: t.name,
                    offset: t.offset,
                    end,
                    len,
                });
            }
            if let Some((index, role)) = Role::parse(&t.name) {
                let experts = t.ne[2].max(1);
                if t.size % experts != 0 {
                    return Err(MapError::Uneven {
                        path: path(t.file),
                        tensor: t.name,
                        size: t.size,
                        experts,
                    });
                }
                let layer = layers.entry(index).or_insert_with(|| LayerExperts {
                    index,
                    experts: u32::try_from(experts).unwrap_or(u32::MAX),
                    parts: Vec::new(),
                });
                if u64::from(layer.experts) != experts {
                    return Err(MapError::CountMismatch {
                        path: path(t.file),
                        layer: index,
                        tensor: t.name,
                        found: experts,
                        expected: layer.experts.into(),
                    });
                }
                layer.parts.push(Part {
                    role,
                    file: t.file,
                    offset: t.offset,
                    bytes: t.size / experts,
                    ne: [t.ne[0], t.ne[1]],
                });
                roles.insert(t.name.clone(), (index, role));
            } else {
                dense_bytes += t.size;
            }
            let file = t.file;
            if let Some(twice) = by_name.insert(t.name.clone(), t) {
                return Err(MapError::Duplicate { path: path(file), tensor: twice.name });
            }
        }
        if layers.is_empty() {
            return Err(MapError::Dense { path: path(0) });
        }
        let mut layers: Vec<_> = layers.into_values().collect();
        for layer in &mut layers {
            layer.parts.sort_by_key(|p| p.role);
            if top_k == 0 || top_k > layer.experts {
                return Err(MapError::TopK {
                    path: path(0),
                    top_k,
                    layer: layer.index,
                    experts: layer.experts,
                });
            }
        }
        let expert_tensors = roles
            .into_iter()
            .filter_map(|(name, (index, role))| {
                let layer = layers.iter().position(|l| l.index == index)?;
                let part = layers[layer].parts.iter().position(|p| p.role == role)?;
                Some((name, PartRef { layer, part }))
            })
            .collect();
        Ok(Self { files, layers, top_k, tensors: by_name, expert_tensors, dense_bytes })
    }

    /// The model's files, in the order of its parts.
    pub fn files(&self) -> &[ModelFile] {
        &self.files
    }

    /// Layers that have experts, in the order of execution.
    pub fn layers(&self) -> &[LayerExperts] {
        &self.layers
    }

    /// Experts that serve a token in each layer.
    pub fn top_k(&self) -> u32 {
        self.top_k
    }

    /// The largest number of experts that a layer has.
    pub fn experts_per_layer(&self) -> u32 {
        self.layers.iter().map(|l| l.experts).max().unwrap_or(0)
    }

    /// All experts, as the file has them.
    pub fn expert_ids(&self) -> impl Iterator<Item = ExpertId> + '_ {
        let per_layer = self.experts_per_layer();
        let layers = (0..).zip(&self.layers);
        layers.flat_map(move |(i, l)| (0..l.experts).map(move |e| ExpertId(i * per_layer + e)))
    }

    /// Number of experts in all layers.
    pub fn expert_count(&self) -> u64 {
        self.layers.iter().map(|l| u64::from(l.experts)).sum()
    }

    /// Bytes of all experts.
    pub fn expert_bytes_total(&self) -> u64 {
        self.layers.iter().map(|l| u64::from(l.experts) * l.expert_bytes()).sum()
    }

    /// Bytes of all other tensors.
    pub fn dense_bytes(&self) -> u64 {
        self.dense_bytes
    }

    /// A tensor of the files by its name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// All tensors that are not experts', in no particular order.
    pub fn dense_tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.values().filter(|t| !self.expert_tensors.contains_key(&t.name))
    }

    /// Which layer and part an expert tensor is; `None` for dense tensors and
    /// for names that the files do not have.
    pub fn expert_tensor(&self, name: &str) -> Option<PartRef> {
        self.expert_tensors.get(name).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(len: u64) -> Vec<ModelFile> {
        vec![ModelFile { path: "m.gguf".into(), len, header_len: 0 }]
    }

    fn tensor(name: &str, offset: u64, size: u64, experts: u64) -> TensorInfo {
        TensorInfo { name: name.into(), file: 0, offset, size, ne: [32, 2, experts, 1] }
    }

    fn moe() -> Vec<TensorInfo> {
        vec![
            tensor("blk.7.ffn_down_exps.weight", 100, 80, 4),
            tensor("blk.7.ffn_gate_exps.weight", 200, 40, 4),
            tensor("blk.7.ffn_up_exps.weight", 300, 40, 4),
            tensor("blk.7.ffn_gate_exps.bias", 400, 10, 1),
            tensor("token_embd.weight", 500, 100, 1),
        ]
    }

    #[test]
    fn parts_come_in_the_order_of_use_and_the_rest_is_dense() {
        let map = ExpertMap::new(files(600), moe(), 2).unwrap();
        let layer = &map.layers()[0];
        assert_eq!((layer.index, layer.experts, layer.expert_bytes()), (7, 4, 40));
        let roles: Vec<_> = layer.parts.iter().map(|p| (p.role, p.offset, p.bytes)).collect();
        assert_eq!(roles, [(Role::Gate, 200, 10), (Role::Up, 300, 10), (Role::Down, 100, 20)]);
        assert_eq!(map.dense_bytes(), 110);
        assert_eq!(map.expert_bytes_total(), 160);
        assert_eq!(
            map.expert_tensor("blk.7.ffn_down_exps.weight"),
            Some(PartRef { layer: 0, part: 2 })
        );
        assert_eq!(map.expert_tensor("blk.7.ffn_down_exps.weight.lora_a"), None);
    }

    #[test]
    fn a_tensor_beyond_the_end_of_its_file_is_truncation() {
        let err = ExpertMap::new(files(599), moe(), 2).unwrap_err();
        assert!(matches!(err, MapError::Truncated { end: 600, len: 599, .. }), "{err}");
    }

    #[test]
    fn an_offset_near_the_integer_limit_is_truncation_not_overflow() {
        let mut tensors = moe();
        tensors[0].offset = u64::MAX - 1;
        assert!(matches!(
            ExpertMap::new(files(600), tensors, 2).unwrap_err(),
            MapError::Truncated { .. }
        ));
    }

    #[test]
    fn contradicting_headers_are_refused() {
        let mut uneven = moe();
        uneven[0].size = 81;
        assert!(matches!(
            ExpertMap::new(files(600), uneven, 2).unwrap_err(),
            MapError::Uneven { .. }
        ));
        let mut count = moe();
        count[1].ne[2] = 2;
        assert!(matches!(
            ExpertMap::new(files(600), count, 2).unwrap_err(),
            MapError::CountMismatch { .. }
        ));
        assert!(matches!(ExpertMap::new(files(600), moe(), 5).unwrap_err(), MapError::TopK { .. }));
        let mut twice = moe();
        twice.push(tensor("token_embd.weight", 500, 100, 1));
        assert!(matches!(
            ExpertMap::new(files(600), twice, 2).unwrap_err(),
            MapError::Duplicate { .. }
        ));
    }

    #[test]
    fn a_dense_model_is_named_as_such() {
        let dense = vec![tensor("blk.0.ffn_up.weight", 0, 8, 1)];
        assert!(matches!(
            ExpertMap::new(files(600), dense, 0).unwrap_err(),
            MapError::Dense { .. }
        ));
    }
}
