//! Profiles as files.
//!
//! A profile is JSON, so that it can be looked at and made by other programs:
//!
//! ```json
//! { "format": "pinscope-profile", "version": 1,
//!   "model": { "id": "<64 hex digits>", "name": "qwen3.gguf",
//!              "layers": [0, 1], "experts_per_layer": 128, "top_k": 8 },
//!   "halves": [
//!     { "prefill": { "tokens": 512, "chosen": [[3, 0, ...], ...], "weight": [[0.41, 0, ...], ...] },
//!       "decode":  { ... } },
//!     { ... } ] }
//! ```
//!
//! `chosen` and `weight` have a row for each layer and a number for each
//! expert: tokens that chose it, and the sum of the weights with which they did.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{ModelId, PhaseCounts, Profile, ProfiledModel, RoutingCounts};

const FORMAT: &str = "pinscope-profile";
const VERSION: u32 = 1;

/// The largest models have a tenth of this; more is no profile.
const MAX_BYTES: u64 = 64 << 20;

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ProfileError {
    #[error("cannot read the profile {path}: {source}. `pinscope profile` makes one")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write the profile {path}: {source}. What was there before is unchanged")]
    Write { path: PathBuf, source: io::Error },
    #[error("{path} is not a profile of PinScope: {why}. `pinscope profile` makes one")]
    NotAProfile { path: PathBuf, why: String },
    #[error("{path} is a profile of version {found}, and this PinScope reads version {VERSION}. Use the PinScope that made it, or make it anew")]
    Version { path: PathBuf, found: u32 },
    #[error("the profile is of another model: it was made with {of}, and this is {wanted} (a model is known by its header, not by its name). Make one for this model with `pinscope profile`")]
    OtherModel { of: String, wanted: String },
}

#[derive(Serialize, Deserialize)]
struct Text {
    format: String,
    version: u32,
    model: Model,
    halves: [Half; 2],
}

#[derive(Serialize, Deserialize)]
struct Model {
    id: String,
    name: String,
    layers: Vec<usize>,
    experts_per_layer: u32,
    top_k: u32,
}

#[derive(Serialize, Deserialize)]
struct Half {
    prefill: Phase,
    decode: Phase,
}

#[derive(Serialize, Deserialize)]
struct Phase {
    tokens: f64,
    chosen: Vec<Vec<f64>>,
    // Rounded: the digits beyond would be half of the file.
    weight: Vec<Vec<f32>>,
}

/// What is read first: files of other versions may have other fields.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u32,
}

impl Profile {
    /// Reads a profile.
    ///
    /// # Errors
    /// A file that cannot be read, is no profile, or is one of another version.
    pub fn load(path: &Path) -> Result<Self, ProfileError> {
        let read = |source| ProfileError::Read { path: path.to_owned(), source };
        let mut text = String::new();
        let file = File::open(path).map_err(read)?;
        file.take(MAX_BYTES).read_to_string(&mut text).map_err(read)?;
        Self::parse(&text, path)
    }

    /// Reads a profile that must be of `model`.
    ///
    /// # Errors
    /// As [`load`](Self::load), and [`ProfileError::OtherModel`].
    pub fn load_for(path: &Path, model: &ProfiledModel) -> Result<Self, ProfileError> {
        let profile = Self::load(path)?;
        profile.check(model)?;
        Ok(profile)
    }

    /// Writes the profile: all of it or nothing, whatever happens meanwhile.
    ///
    /// # Errors
    /// [`ProfileError::Write`]; the old file is as it was then.
    pub fn save(&self, path: &Path) -> Result<(), ProfileError> {
        let _lock = lock_folder(path).map_err(|source| write_error(path, source))?;
        self.replace(path)
    }

    /// Records `pieces` of traffic of `model` in the profile at `path`, which
    /// is made if there is none. Two processes that do so at the same time both
    /// get theirs in.
    ///
    /// # Errors
    /// As [`load`](Self::load) and [`save`](Self::save), and a profile that is
    /// of another model.
    pub fn append(
        path: &Path,
        model: &ProfiledModel,
        pieces: &[RoutingCounts],
    ) -> Result<(), ProfileError> {
        let _lock = lock_folder(path).map_err(|source| write_error(path, source))?;
        let mut sum = match Self::load(path) {
            Ok(old) => old,
            Err(ProfileError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Self::new(model.clone())
            }
            Err(e) => return Err(e),
        };
        sum.check(model)?;
        pieces.iter().for_each(|piece| sum.record(piece));
        sum.replace(path)
    }

    fn replace(&self, path: &Path) -> Result<(), ProfileError> {
        let write = || {
            let mut name = path.file_name().unwrap_or_default().to_owned();
            name.push(".new");
            let new = path.with_file_name(name);
            let mut file = File::create(&new)?;
            file.write_all(self.to_text()?.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, path)
        };
        write().map_err(|source| write_error(path, source))
    }

    fn to_text(&self) -> io::Result<String> {
        let per_layer = self.model.experts_per_layer.max(1) as usize;
        let phase = |p: &PhaseCounts| Phase {
            tokens: p.tokens,
            chosen: p.chosen.chunks(per_layer).map(<[f64]>::to_vec).collect(),
            weight: p
                .weight
                .chunks(per_layer)
                .map(|row| row.iter().map(|&w| w as f32).collect())
                .collect(),
        };
        let half =
            |h: &RoutingCounts| Half { prefill: phase(&h.prefill), decode: phase(&h.decode) };
        let text = Text {
            format: FORMAT.into(),
            version: VERSION,
            model: Model {
                id: self.model.id.to_string(),
                name: self.model.name.clone(),
                layers: self.model.layers.clone(),
                experts_per_layer: self.model.experts_per_layer,
                top_k: self.model.top_k,
            },
            halves: [half(&self.halves[0]), half(&self.halves[1])],
        };
        Ok(serde_json::to_string(&text)? + "\n")
    }

    /// `path` is for errors only.
    pub(super) fn parse(text: &str, path: &Path) -> Result<Self, ProfileError> {
        let wrong = |why: String| ProfileError::NotAProfile { path: path.to_owned(), why };
        let head: Head = serde_json::from_str(text).map_err(|e| wrong(e.to_string()))?;
        if head.format != FORMAT {
            return Err(wrong(format!("its format is {:?}", head.format)));
        }
        if head.version != VERSION {
            return Err(ProfileError::Version { path: path.to_owned(), found: head.version });
        }
        let text: Text = serde_json::from_str(text).map_err(|e| wrong(e.to_string()))?;
        let Text { model, halves: [a, b], .. } = text;
        let id = ModelId::parse(&model.id).ok_or_else(|| wrong("its model's id is none".into()))?;
        let model = ProfiledModel {
            id,
            name: model.name,
            layers: model.layers,
            experts_per_layer: model.experts_per_layer,
            top_k: model.top_k,
        };
        let half = |h: Half| -> Option<RoutingCounts> {
            Some(RoutingCounts {
                prefill: counts(h.prefill, &model)?,
                decode: counts(h.decode, &model)?,
            })
        };
        match (half(a), half(b)) {
            (Some(a), Some(b)) => Ok(Self { model, halves: [a, b] }),
            _ => Err(wrong("its counts do not fit its model, or are no counts".into())),
        }
    }
}

/// `None` for counts that no such model can have.
fn counts(phase: Phase, model: &ProfiledModel) -> Option<PhaseCounts> {
    let (layers, per_layer) = (model.layers.len(), model.experts_per_layer as usize);
    let table = |rows: Vec<Vec<f64>>| {
        let fits = rows.len() == layers && rows.iter().all(|r| r.len() == per_layer);
        let flat: Vec<f64> = rows.into_iter().flatten().collect();
        (fits && flat.iter().all(|v| v.is_finite() && *v >= 0.0)).then_some(flat)
    };
    let weight = phase.weight.into_iter().map(|r| r.into_iter().map(f64::from).collect()).collect();
    (phase.tokens.is_finite() && phase.tokens >= 0.0).then_some(())?;
    Some(PhaseCounts { tokens: phase.tokens, chosen: table(phase.chosen)?, weight: table(weight)? })
}

fn write_error(path: &Path, source: io::Error) -> ProfileError {
    ProfileError::Write { path: path.to_owned(), source }
}

/// Held while a profile is replaced. The folder is locked, since the file
/// itself is another one afterwards, and a lock file would be left behind.
fn lock_folder(path: &Path) -> io::Result<File> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = File::open(folder)?;
    folder.lock()?;
    Ok(folder)
}
