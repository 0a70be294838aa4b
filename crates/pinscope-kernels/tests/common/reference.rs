//! What each type's product is on x86, in plain loops: the sums of integers,
//! and the order in which floating-point numbers are added.

use half::f16;
use pinscope_kernels::{Order, WeightType};

/// A block: weight `i` is `d * scale[i / 16] * (q[i] - OFFSET) - dmin * min[i / 32]`,
/// where only Q6_K has an offset.
#[derive(Default)]
struct Block {
    d: f32,
    dmin: f32,
    q: Vec<i32>,
    scale: Vec<i32>,
    min: Vec<i32>,
}

const Q6K_OFFSET: i32 = 32;
/// Twice the numbers that 4-bit floats stand for.
const FP4: [i32; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
const IQ4: [i32; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// Runs of `run` bytes: the low nibbles of each, then its high nibbles.
fn nibbles(bytes: &[u8], run: usize) -> Vec<i32> {
    let halves = |run: &[u8]| {
        let low = run.iter().map(|b| i32::from(b & 15)).collect::<Vec<_>>();
        low.into_iter().chain(run.iter().map(|b| i32::from(b >> 4)).collect::<Vec<_>>())
    };
    bytes.chunks(run).flat_map(halves).collect()
}

/// A scale and a minimum for each 32: six bits, the last four in pieces.
fn scale_and_min(b: &[u8], i: usize) -> (i32, i32) {
    let (scale, min) = if i < 4 {
        (b[i] & 63, b[i + 4] & 63)
    } else {
        (b[i + 4] & 15 | b[i - 4] >> 6 << 4, b[i + 4] >> 4 | b[i] >> 6 << 4)
    };
    (i32::from(scale), i32::from(min))
}

/// The scales of 32 weights each, once for each 16.
fn twice(scales: impl Iterator<Item = i32>) -> Vec<i32> {
    scales.flat_map(|scale| [scale; 2]).collect()
}

fn decode(type_: WeightType, b: &[u8]) -> Block {
    let one = vec![1; 2];
    let with_mins = |q| Block {
        d: half(b),
        dmin: half(&b[2..]),
        q,
        scale: twice((0..8).map(|i| scale_and_min(&b[4..], i).0)),
        min: (0..8).map(|i| scale_and_min(&b[4..], i).1).collect(),
    };
    match type_ {
        WeightType::Q4_0 => {
            let q = nibbles(&b[2..], 16).iter().map(|q| q - 8).collect();
            Block { d: half(b), q, scale: one, ..Block::default() }
        }
        WeightType::Q8_0 => {
            let q = b[2..].iter().map(|&q| i32::from(q as i8)).collect();
            Block { d: half(b), q, scale: one, ..Block::default() }
        }
        WeightType::Mxfp4 => {
            let q = nibbles(&b[1..], 16).iter().map(|&q| FP4[q as usize]).collect();
            let d = 2f64.powi(i32::from(b[0]) - 128) as f32;
            Block { d, q, scale: one, ..Block::default() }
        }
        WeightType::Q4K => with_mins(nibbles(&b[16..], 32)),
        WeightType::Q5K => {
            let fifth = |i: usize| i32::from(b[16 + i % 32] >> (i / 32) & 1);
            let low = nibbles(&b[48..], 32);
            with_mins(low.iter().enumerate().map(|(i, q)| q | fifth(i) << 4).collect())
        }
        WeightType::Q6K => {
            // Two halves of 128 weights: nibbles of 64 bytes, pairs of bits of 32.
            let high =
                |i: usize| i32::from(b[128 + 32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32)) & 3);
            let low = nibbles(&b[..128], 64);
            Block {
                d: half(&b[208..]),
                q: low.iter().enumerate().map(|(i, q)| q | high(i) << 4).collect(),
                scale: b[192..208].iter().map(|&s| i32::from(s as i8)).collect(),
                ..Block::default()
            }
        }
        WeightType::Iq4Xs => {
            let high = u16::from_le_bytes([b[2], b[3]]);
            let low = nibbles(&b[4..8], 1);
            let scale = |i: usize| (low[i] | i32::from(high >> (2 * i) & 3) << 4) - 32;
            let q = nibbles(&b[8..], 16).iter().map(|&q| IQ4[q as usize]).collect();
            Block { d: half(b), q, scale: twice((0..8).map(scale)), ..Block::default() }
        }
    }
}

/// A block of inputs: its scale and its numbers.
fn inputs(type_: WeightType, b: &[u8]) -> (f32, Vec<i32>) {
    let (d, at) = match type_.block_len() {
        32 => (half(b), 2),
        _ => (f32::from_le_bytes([b[0], b[1], b[2], b[3]]), 4),
    };
    (d, b[at..][..type_.block_len()].iter().map(|&x| i32::from(x as i8)).collect())
}

/// Eight lanes become one: upper half to lower half, twice, then the last two.
fn sum(lanes: [f32; 8]) -> f32 {
    let four: [f32; 4] = std::array::from_fn(|i| lanes[i + 4] + lanes[i]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// The products of `weights` with `x`, scaled, at the places that `of` chooses.
fn scaled(w: &Block, x: &[i32], of: impl Fn(usize) -> bool) -> i32 {
    let places = (0..x.len()).filter(|&i| of(i));
    places.map(|i| w.scale[i / 16] * w.q[i] * x[i]).sum()
}

/// What a minimum is multiplied with: 32 inputs.
fn minimum(w: &Block, x: &[i32], i: usize) -> i32 {
    w.min[i] * x[32 * i..32 * i + 32].iter().sum::<i32>()
}

/// [`Order::VecDot`]: of each 32 weights a lane has four neighbours. A block's
/// lanes are exact integers; each is then multiplied by both scales, whose
/// product is rounded, and added to the row's lane in one operation.
fn vec_dot(type_: WeightType, blocks: &[(Block, (f32, Vec<i32>))]) -> f32 {
    let mut lanes = [[0f32; 8]; 2];
    let mut mins = [0f32; 4];
    let mut last = None;
    for (n, (w, (dx, x))) in blocks.iter().enumerate() {
        let mut sums: [i32; 8] = std::array::from_fn(|l| scaled(w, x, |i| i % 32 / 4 == l));
        let mut of = 0;
        match type_ {
            // Even and odd blocks have lanes of their own; one without a
            // partner is added at the end.
            WeightType::Mxfp4 if n % 2 == 0 && n + 1 == blocks.len() => {
                last = Some((w.d * dx, sums.iter().sum::<i32>()));
                continue;
            }
            WeightType::Mxfp4 => of = n % 2,
            // A lane loses the offset of 32 weights: not those that it has.
            WeightType::Q6K => {
                for (l, sum) in sums.iter_mut().enumerate() {
                    let of_32 = (32 * l..32 * l + 32).map(|i| w.scale[i / 16] * x[i]);
                    *sum -= Q6K_OFFSET * of_32.sum::<i32>();
                }
            }
            // Minima have four lanes of 64 weights each.
            WeightType::Q4K => {
                for (l, lane) in mins.iter_mut().enumerate() {
                    let sum = minimum(w, x, 2 * l) + minimum(w, x, 2 * l + 1);
                    *lane = (-dx * w.dmin).mul_add(sum as f32, *lane);
                }
            }
            // Or one.
            WeightType::Q5K => {
                let sum: i32 = (0..8).map(|i| minimum(w, x, i)).sum();
                mins[0] = (-dx * w.dmin).mul_add(sum as f32, mins[0]);
            }
            _ => {}
        }
        for (lane, sum) in lanes[of].iter_mut().zip(sums) {
            *lane = (w.d * dx).mul_add(sum as f32, *lane);
        }
    }
    let total = match type_ {
        WeightType::Mxfp4 => sum(std::array::from_fn(|l| lanes[0][l] + lanes[1][l])),
        WeightType::Q4K => sum(lanes[0]) + ((mins[0] + mins[2]) + (mins[1] + mins[3])),
        WeightType::Q5K => sum(lanes[0]) + mins[0],
        _ => sum(lanes[0]),
    };
    last.map_or(total, |(scale, sum)| scale.mul_add(sum as f32, total))
}

/// [`Order::Tiled`]: a block is one exact integer (and one of its minima), which
/// is multiplied by the weights' scale and, as it is added to the row's one sum,
/// by the inputs' scale.
fn tiled(type_: WeightType, blocks: &[(Block, (f32, Vec<i32>))]) -> f32 {
    let mut total = 0f32;
    for (w, (dx, x)) in blocks {
        let mut sum = scaled(w, x, |_| true);
        if type_ == WeightType::Q6K {
            sum -= Q6K_OFFSET * (0..256).map(|i| w.scale[i / 16] * x[i]).sum::<i32>();
        }
        let mut value = w.d * sum as f32;
        if !w.min.is_empty() {
            let mins: i32 = (0..8).map(|i| minimum(w, x, i)).sum();
            value = (-w.dmin).mul_add(mins as f32, value);
        }
        total = value.mul_add(*dx, total);
    }
    total
}

/// One row, `weights`, times one quantised column, `inputs`.
pub fn product(type_: WeightType, order: Order, weights: &[u8], column: &[u8]) -> f32 {
    let weights = weights.chunks_exact(type_.block_bytes()).map(|b| decode(type_, b));
    let column = column.chunks_exact(type_.input_block_bytes()).map(|b| inputs(type_, b));
    let blocks: Vec<_> = weights.zip(column).collect();
    match order {
        Order::VecDot => vec_dot(type_, &blocks),
        Order::Tiled => tiled(type_, &blocks),
    }
}
