//! What files with experts of several sizes lose of their memory.

use super::*;
use crate::layout::Layout;
use crate::map::{ExpertMap, ModelFile, TensorInfo};

/// Bits for a weight of each quantisation, with its block's scales.
const Q4_K: f64 = 4.5;
const Q6_K: f64 = 6.5625;

/// Down projections that llama.cpp's Q4_K_M gives more bits (`use_more_bits`).
fn more_bits(layer: u64, layers: u64) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

/// Layers, experts of each, width of the model and of an expert.
const SHAPES: [(&str, u64, u64, u64, u64); 6] = [
    ("qwen3-30b-a3b", 48, 128, 2048, 768),
    ("olmoe", 16, 64, 2048, 1024),
    ("mixtral-8x7b", 32, 8, 4096, 14336),
    ("deepseek-v3", 58, 256, 7168, 2048),
    ("granite-3.1-3b-a800m", 32, 40, 1536, 512),
    ("qwen3-235b-a22b", 94, 128, 4096, 1536),
];

/// A Q4_K_M file of that shape, with a dense part of an odd size before each
/// layer's experts, as GGUF's alignment of 32 bytes allows.
fn q4_k_m((_, layers, experts, width, inner): (&str, u64, u64, u64, u64)) -> ExpertMap {
    let (mut tensors, mut offset) = (Vec::new(), 4096 * 700 + 32 * 13);
    for layer in 0..layers {
        let down = if more_bits(layer, layers) { Q6_K } else { Q4_K };
        for (name, bits) in [("gate", Q4_K), ("up", Q4_K), ("down", down)] {
            let size = (width * inner) as f64 * bits / 8.0;
            let size = size as u64 * experts;
            tensors.push(TensorInfo {
                name: format!("blk.{layer}.ffn_{name}_exps.weight"),
                file: 0,
                offset,
                size,
                ne: [1, 1, experts, 1],
            });
            offset += size;
        }
        offset += 12_345 * 32;
    }
    let files = vec![ModelFile { path: "m".into(), len: offset, header_len: 0 }];
    ExpertMap::new(files, tensors, 2).unwrap()
}

/// Bytes of experts that the slots of `layout` hold.
fn held(map: &ExpertMap, layout: &Layout) -> f64 {
    let class = |c: usize| layout.class_of_layer.iter().position(|k| *k == c).unwrap();
    let bytes = |c: usize| map.layers()[class(c)].expert_bytes() as f64;
    layout.classes.iter().enumerate().map(|(c, k)| k.slots as f64 * bytes(c)).sum()
}

#[test]
fn slots_hold_experts_but_for_less_than_two_percent_and_what_is_left_holds_none() {
    for shape in SHAPES {
        let map = q4_k_m(shape);
        for percent in [10, 25, 57, 90] {
            let bytes = map.expert_bytes_total() * percent / 100;
            let layout = Layout::new(&map, bytes).unwrap();
            assert_eq!(layout.classes.len(), 2, "{}: two sizes of experts", shape.0);
            let rounding = 1.0 - held(&map, &layout) / layout.used() as f64;
            println!("{} at {percent} %: {:.2} % lost", shape.0, 100.0 * rounding);
            assert!(rounding < 0.02, "{} at {percent} %: {rounding}", shape.0);
            let largest = layout.classes.iter().map(|c| c.stride).max().unwrap();
            assert!(bytes - layout.used() < largest);
        }
    }
}

/// Bytes that generated tokens read in a room.
fn read(trace: &Trace, room: &Room) -> u64 {
    let warm = Warm { rates: None, passes: trace.model.layers.len() * 50 };
    let build = &mut |s| build(PolicyKind::default(), s);
    replay(trace, room, build, warm).decode.bytes
}

#[test]
fn pools_that_do_not_share_memory_are_as_good_as_98_percent_in_one_pool() {
    let layers = 24;
    let size = |l: u64| if more_bits(l, layers) { 22 * PAGE } else { 18 * PAGE };
    let alternating: Vec<u64> = (0..layers).map(size).collect();
    // One layer of its own size, as where a converter kept it whole.
    let one: Vec<u64> = (0..layers).map(|l| if l == 3 { 30 * PAGE } else { 18 * PAGE }).collect();
    for (name, sizes) in [("Q4_K_M", alternating), ("one of another size", one)] {
        let trace = random(5, &sizes, 64, 250);
        let map = trace.model.map().unwrap();
        for percent in [20, 50, 80] {
            let bytes = map.expert_bytes_total() * percent / 100;
            let slots = read(&trace, &Room::slots(&trace.model, bytes).unwrap());
            let shared = |percent: u64| read(&trace, &Room::shared(&map, bytes * percent / 100));
            let more = slots as f64 / shared(100) as f64 - 1.0;
            println!("{name} at {percent} %: {:.2} % more read than in one pool", 100.0 * more);
            assert!(slots <= shared(98), "{name} at {percent} %: {slots}");
        }
    }
}
