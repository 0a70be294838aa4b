//! Spherical k-means on centred points (Dhillon and Modha 2001).

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Rounds of assignment and update; more change little.
const ROUNDS: usize = 10;

/// Clusters of points by their direction from the mean.
pub struct Clusters {
    /// Unit vectors, made orthogonal to the mean. So a point's product with them does
    /// not depend on the mean, and a router made of them needs no bias.
    pub centroids: Vec<Vec<f32>>,
    /// Mean distance of the points from their mean.
    pub distance: f32,
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Eight running sums, so that the compiler may use vector registers.
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f32 = a8.remainder().iter().zip(b8.remainder()).map(|(x, y)| x * y).sum();
    let mut sums = [0f32; 8];
    for (x, y) in a8.zip(b8) {
        for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
            *sum += x * y;
        }
    }
    sums.iter().sum::<f32>() + rest
}

fn norm(v: &[f32]) -> f32 {
    dot(v, v).sqrt()
}

fn scale_to_unit(v: &mut [f32]) {
    let scale = 1.0 / (norm(v) + 1e-9);
    v.iter_mut().for_each(|x| *x *= scale);
}

fn add(to: &mut [f32], v: &[f32], factor: f32) {
    for (x, y) in to.iter_mut().zip(v) {
        *x += factor * y;
    }
}

/// Clusters `points`, rows of `width` values, into `count` groups.
///
/// # Panics
/// If there are no points.
pub fn cluster(mut points: Vec<f32>, width: usize, count: usize, seed: u64) -> Clusters {
    let rows = points.len() / width;
    let mut mean = vec![0f32; width];
    for row in points.chunks(width) {
        add(&mut mean, row, 1.0 / rows as f32);
    }
    let mut distance = 0.0;
    for row in points.chunks_mut(width) {
        add(row, &mean, -1.0);
        distance += norm(row) / rows as f32;
        scale_to_unit(row);
    }
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut any = || {
        let row = rng.random_range(0..rows);
        points[row * width..][..width].to_vec()
    };
    let mut centroids: Vec<Vec<f32>> = (0..count).map(|_| any()).collect();
    for _ in 0..ROUNDS {
        let mut sums = vec![vec![0f32; width]; count];
        for row in points.chunks(width) {
            let nearest = centroids.iter().map(|c| dot(c, row)).enumerate();
            let (nearest, _) =
                nearest.max_by(|a, b| a.1.total_cmp(&b.1)).expect("at least one centroid");
            add(&mut sums[nearest], row, 1.0);
        }
        for sum in &mut sums {
            if norm(sum) == 0.0 {
                *sum = any();
            }
            scale_to_unit(sum);
        }
        centroids = sums;
    }
    scale_to_unit(&mut mean);
    for centroid in &mut centroids {
        let along = dot(centroid, &mean);
        add(centroid, &mean, -along);
    }
    Clusters { centroids, distance }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn well_separated_directions_get_a_centroid_each() {
        // Around (10, 10, 10): points along +x, -x, +y and -y, at distance 2.
        let directions = [[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0], [0.0, -2.0]];
        let points: Vec<f32> = (0..400)
            .flat_map(|i| {
                let [x, y] = directions[i % 4];
                [10.0 + x, 10.0 + y, 10.0]
            })
            .collect();
        let best = (0..5)
            .map(|seed| {
                let clusters = cluster(points.clone(), 3, 4, seed);
                assert!((clusters.distance - 2.0).abs() < 1e-3);
                let covered = directions.iter().filter(|[x, y]| {
                    let like = |c: &Vec<f32>| (c[0] * x + c[1] * y) / 2.0;
                    clusters.centroids.iter().any(|c| like(c) > 0.6)
                });
                covered.count()
            })
            .max();
        assert_eq!(best, Some(4));
    }

    #[test]
    fn centroids_do_not_see_the_mean() {
        let points: Vec<f32> = (0..300).map(|i| 5.0 + (i as f32 * 1.7).sin()).collect();
        let clusters = cluster(points, 3, 4, 1);
        for c in &clusters.centroids {
            assert!(c.iter().sum::<f32>().abs() < 0.2, "{c:?}");
        }
    }

    #[test]
    fn dot_handles_lengths_that_are_no_multiple_of_eight() {
        let a: Vec<f32> = (0..19).map(|i| i as f32).collect();
        assert_eq!(dot(&a, &a), (0..19).map(|i| (i * i) as f32).sum::<f32>());
    }
}
