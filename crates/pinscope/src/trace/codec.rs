//! The bytes of a trace.
//!
//! ```text
//! file    = "PINTRACE" version(u32) length(u32) header, then passes
//! header  = id(32 bytes) name(number, UTF-8) experts_per_layer top_k layers
//!           { index experts parts { offset bytes } }
//! pass    = length flags layer tokens choices { expert [tokens] weight(u16) }
//! ```
//!
//! Numbers are LEB128 unless a width is given; those with a width are little
//! endian. Flag 1 is a generated token. The tokens of a choice are there only
//! in batches of several; a weight is the upper half of an `f32` (bfloat16).
//! The length of a pass makes an end within one known for what it is.

use std::io::{self, Read};

use super::{Choice, Pass, TracedLayer, TracedModel};
use crate::layout::PAGE;
use crate::profile::ModelId;

pub(super) const MAGIC: &[u8; 8] = b"PINTRACE";
pub(super) const VERSION: u32 = 1;

/// Headers and passes are no longer than this: lengths beyond are damage, and
/// nothing of such a size is allocated.
pub(super) const LONGEST: u32 = 16 << 20;

const DECODE: u8 = 1;

/// In place of a model's identity that is not known.
const NO_ID: [u8; 32] = [0; 32];

/// Limits of a model, so that products of what a header says stay numbers.
const MOST_LAYERS: u64 = 1 << 12;
const MOST_EXPERTS: u64 = 1 << 16;
const MOST_BYTES: u64 = 1 << 40;

pub(super) fn put(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// What is left of a header or pass.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self) -> Option<u64> {
        number(|| self.take().map(|[b]| b))
    }

    /// A number up to `most`.
    fn up_to(&mut self, most: u64) -> Option<u64> {
        self.number().filter(|n| *n <= most)
    }
}

fn number(mut byte: impl FnMut() -> Option<u8>) -> Option<u64> {
    let mut n = 0;
    for shift in (0..64).step_by(7) {
        let b = byte()?;
        n |= u64::from(b & 0x7f).checked_shl(shift)?;
        if b < 0x80 {
            return Some(n);
        }
    }
    None
}

/// The file up to its first pass.
pub(super) fn header(model: &TracedModel) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend_from_slice(model.id.as_ref().map_or(&NO_ID[..], |id| id.as_bytes()));
    put(&mut body, model.name.len() as u64);
    body.extend_from_slice(model.name.as_bytes());
    let counts = [model.experts_per_layer, model.top_k, model.layers.len() as u32];
    counts.iter().for_each(|&n| put(&mut body, u64::from(n)));
    for layer in &model.layers {
        let counts = [layer.index, layer.experts, layer.parts.len() as u32];
        counts.iter().for_each(|&n| put(&mut body, u64::from(n)));
        for &(offset, bytes) in &layer.parts {
            put(&mut body, offset);
            put(&mut body, bytes);
        }
    }
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(body.len() as u32).to_le_bytes());
    out.extend_from_slice(&body);
    out
}

/// The header's body; `None` if there is no such model.
pub(super) fn parse_header(body: &[u8]) -> Option<TracedModel> {
    let mut b = Bytes(body);
    let id = ModelId::from_bytes(b.take()?);
    let name = b.number()?;
    let (name, rest) = b.0.split_at_checked(usize::try_from(name).ok()?)?;
    b.0 = rest;
    let name = std::str::from_utf8(name).ok()?.to_owned();
    let experts_per_layer = b.up_to(MOST_EXPERTS)? as u32;
    let top_k = b.up_to(u64::from(experts_per_layer))? as u32;
    let mut layers = Vec::new();
    for _ in 0..b.up_to(MOST_LAYERS)? {
        let index = b.up_to(MOST_LAYERS)? as u32;
        let experts = b.up_to(u64::from(experts_per_layer))? as u32;
        let mut parts = Vec::new();
        for _ in 0..b.up_to(3)? {
            parts.push((b.up_to(PAGE - 1)?, b.up_to(MOST_BYTES)?));
        }
        layers.push(TracedLayer { index, experts, parts });
    }
    let sound = |l: &TracedLayer| l.experts >= top_k && l.expert_bytes() > 0;
    let ascend = layers.windows(2).all(|w| w[0].index < w[1].index);
    let sound = !layers.is_empty() && top_k > 0 && ascend && layers.iter().all(sound);
    (sound && b.0.is_empty()).then_some(TracedModel {
        id: (id.as_bytes() != &NO_ID).then_some(id),
        name,
        experts_per_layer,
        top_k,
        layers,
    })
}

/// Appends a pass to `out`.
pub(super) fn put_pass(
    out: &mut Vec<u8>,
    body: &mut Vec<u8>,
    (layer, tokens, decode): (u32, u32, bool),
    choices: impl ExactSizeIterator<Item = Choice>,
) {
    body.clear();
    body.push(if decode { DECODE } else { 0 });
    [layer, tokens, choices.len() as u32].iter().for_each(|&n| put(body, u64::from(n)));
    for c in choices {
        put(body, u64::from(c.expert));
        if tokens > 1 {
            put(body, u64::from(c.tokens));
        }
        // To the nearest: half of the last bit that stays is added.
        let bits = c.weight.max(0.0).to_bits();
        body.extend_from_slice(&((bits.saturating_add(0x8000) >> 16) as u16).to_le_bytes());
    }
    put(out, body.len() as u64);
    out.extend_from_slice(body);
}

/// The body of a pass of `model`, or what is wrong with it.
pub(super) fn parse_pass(body: &[u8], model: &TracedModel) -> Result<Pass, &'static str> {
    let short = "it is shorter than its choices";
    let mut b = Bytes(body);
    let [flags] = b.take().ok_or(short)?;
    if flags > DECODE {
        return Err("it has unknown flags");
    }
    let layer = b.number().ok_or(short)?;
    let experts = match model.layers.get(usize::try_from(layer).unwrap_or(usize::MAX)) {
        Some(layer) => u64::from(layer.experts),
        None => return Err("the model has no such layer"),
    };
    let tokens = b.up_to(u64::from(u32::MAX)).filter(|&n| n > 0).ok_or("it has no tokens")? as u32;
    let n = b.up_to(experts).ok_or("the layer has fewer experts")?;
    let mut choices = Vec::with_capacity(n as usize);
    for _ in 0..n {
        let expert = b.number().ok_or(short)?;
        if expert >= experts {
            return Err("the layer has no such expert");
        }
        let by = match tokens {
            1 => 1,
            all => {
                b.up_to(u64::from(all)).filter(|&n| n > 0).ok_or("a choice of no tokens")? as u32
            }
        };
        let weight = u16::from_le_bytes(b.take().ok_or(short)?);
        let weight = f32::from_bits(u32::from(weight) << 16);
        if !weight.is_finite() || weight < 0.0 {
            return Err("a weight is no weight");
        }
        choices.push(Choice { expert: expert as u32, tokens: by, weight });
    }
    if !b.0.is_empty() {
        return Err("it is longer than its choices");
    }
    let mut ids: Vec<u32> = choices.iter().map(|c| c.expert).collect();
    ids.sort_unstable();
    if ids.windows(2).any(|w| w[0] == w[1]) {
        return Err("it lists an expert twice");
    }
    Ok(Pass { layer: layer as u32, tokens, decode: flags == DECODE, choices })
}

/// What comes next in a file of passes.
pub(super) enum Next {
    Pass,
    /// The file is over.
    End,
    /// It ends within a pass.
    Cut,
    Damaged,
}

/// Reads the body of the next pass.
///
/// # Errors
/// The file cannot be read.
pub(super) fn next_pass(from: &mut impl Read, body: &mut Vec<u8>) -> io::Result<Next> {
    let (mut failed, mut read, mut end) = (None, 0, false);
    let length = number(|| {
        let mut byte = [0];
        match from.read_exact(&mut byte) {
            Ok(()) => {
                read += 1;
                return Some(byte[0]);
            }
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => end = true,
            Err(e) => failed = Some(e),
        }
        None
    });
    if let Some(e) = failed {
        return Err(e);
    }
    match length {
        None if end && read == 0 => Ok(Next::End),
        None if end => Ok(Next::Cut),
        Some(length) if length <= u64::from(LONGEST) => {
            body.clear();
            let got = from.by_ref().take(length).read_to_end(body)?;
            Ok(if got as u64 == length { Next::Pass } else { Next::Cut })
        }
        _ => Ok(Next::Damaged),
    }
}
