//! Random tensor data at disk speed.
//!
//! Gaussian noise in a quantised format is drawn from a pool: some thousand tiles are
//! made and quantised by ggml, and a tensor is a random sequence of them. So every block
//! is one that ggml's own quantiser produced, in every format, for the price of a copy.

use std::collections::HashMap;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;

use crate::disk::PartialFile;
use crate::error::Error;
use crate::gguf::{TensorInfo, TensorType};

/// Elements of a tile: the largest block of any format.
const TILE: usize = 256;
/// Tiles in a pool; with Q4_K it then fits a second-level cache.
const TILES: usize = 2048;

/// What a tensor holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// One value everywhere.
    Constant(f32),
    /// Independent normal values of this standard deviation.
    Gaussian(f32),
    /// Rows of independent normal values, plus in each row a multiple of the direction
    /// that all token embeddings share; the factor is a normal value too.
    Directed {
        /// Standard deviation of the independent part.
        spread: f32,
        /// Mean of the factor before the direction.
        mean: f32,
        /// Standard deviation of the factor before the direction.
        skew: f32,
    },
}

/// Makes tensor data; the same seed, name and shape give the same bytes.
pub struct Filler {
    seed: u64,
    pools: HashMap<(TensorType, u32), Vec<u8>>,
    direction: Vec<f32>,
}

fn normals(rng: &mut StdRng, count: usize, std: f32) -> Vec<f32> {
    let unit = |rng: &mut StdRng| -> f32 { StandardNormal.sample(rng) };
    (0..count).map(|_| std * unit(rng)).collect()
}

impl Filler {
    /// A filler for hidden states of length `embd`.
    pub fn new(seed: u64, embd: usize) -> Self {
        let mut filler = Self { seed, pools: HashMap::new(), direction: Vec::new() };
        let direction = normals(&mut filler.rng("direction"), embd, 1.0);
        let rms = (direction.iter().map(|v| v * v).sum::<f32>() / embd as f32).sqrt();
        filler.direction = direction.iter().map(|v| v / rms).collect();
        filler
    }

    /// Every tensor has its own stream of numbers, so leaving layers out changes no other.
    fn rng(&self, name: &str) -> StdRng {
        let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        StdRng::seed_from_u64(name.bytes().fold(self.seed ^ 0xcbf2_9ce4_8422_2325, fnv))
    }

    /// Writes the data of one tensor.
    ///
    /// # Errors
    /// When the disk refuses it.
    pub fn fill(
        &mut self,
        info: &TensorInfo,
        content: &Content,
        file: &mut PartialFile,
    ) -> Result<(), Error> {
        let mut rng = self.rng(&info.name);
        let row = info.ne[0] as usize;
        let rows = info.elements() / row;
        match *content {
            Content::Constant(value) => {
                let bytes = info.ty.encode(&vec![value; row]);
                (0..rows).try_for_each(|_| file.write(&bytes))
            }
            // Floats are cheap enough to draw one by one.
            Content::Gaussian(std) if info.ty == TensorType::F32 => (0..rows)
                .try_for_each(|_| file.write(&info.ty.encode(&normals(&mut rng, row, std)))),
            Content::Gaussian(std) => self.tiles(&mut rng, info.ty, info.elements(), std, file),
            Content::Directed { spread, mean, skew } => (0..rows).try_for_each(|_| {
                let factor = mean + normals(&mut rng, 1, skew)[0];
                let mut values = normals(&mut rng, row, spread);
                for (value, d) in values.iter_mut().zip(&self.direction) {
                    *value += factor * d;
                }
                file.write(&info.ty.encode(&values))
            }),
        }
    }

    fn tiles(
        &mut self,
        rng: &mut StdRng,
        ty: TensorType,
        elements: usize,
        std: f32,
        file: &mut PartialFile,
    ) -> Result<(), Error> {
        let tile_bytes = ty.bytes(TILE);
        let mut pool_rng = self.rng(&format!("pool {ty} {std}"));
        let pool = self.pools.entry((ty, std.to_bits())).or_insert_with(|| {
            normals(&mut pool_rng, TILES * TILE, std)
                .par_chunks(TILE)
                .flat_map_iter(|tile| ty.encode(tile))
                .collect()
        });
        let mut left = ty.bytes(elements);
        while left > 0 {
            let at = rng.random_range(0..TILES) * tile_bytes;
            let take = left.min(tile_bytes);
            file.write(&pool[at..at + take])?;
            left -= take;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMBD: usize = 64;

    /// The values of a tensor of 256 rows.
    fn values(ty: TensorType, content: &Content) -> Vec<f32> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t");
        let info = TensorInfo { name: "t".into(), ty, ne: vec![EMBD as u64, 256] };
        let mut file = PartialFile::create(&path, info.bytes() as u64).unwrap();
        Filler::new(7, EMBD).fill(&info, content, &mut file).unwrap();
        file.publish().unwrap();
        ty.decode(&std::fs::read(&path).unwrap())
    }

    fn deviation(values: &[f32]) -> f32 {
        (values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32).sqrt()
    }

    #[test]
    fn gaussian_values_have_the_asked_deviation_in_every_type() {
        for ty in TensorType::WRITABLE {
            let values = values(ty, &Content::Gaussian(0.25));
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            assert!((deviation(&values) - 0.25).abs() < 0.025, "{ty}: {}", deviation(&values));
            assert!(mean.abs() < 0.01, "{ty}: mean {mean}");
        }
    }

    #[test]
    fn embeddings_share_a_direction_of_the_asked_length() {
        let content = Content::Directed { spread: 1.0, mean: 0.6, skew: 0.0 };
        let values = values(TensorType::F32, &content);
        let rows = values.len() / EMBD;
        let mut mean = vec![0f32; EMBD];
        for row in values.chunks(EMBD) {
            mean.iter_mut().zip(row).for_each(|(m, v)| *m += v / rows as f32);
        }
        // 0.6 plus the noise of 256 rows: sqrt(0.36 + 1/256) = 0.603.
        assert!((deviation(&mean) - 0.603).abs() < 0.03, "{}", deviation(&mean));
    }
}
