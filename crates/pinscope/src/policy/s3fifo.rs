//! S3-FIFO: Yang et al., "FIFO queues are all you need for cache eviction",
//! SOSP 2023. A small queue filters out what is used once, a main queue keeps
//! what is used again, a ghost queue remembers who was filtered out wrongly.
//! It knows nothing of layers.

use super::list::{Links, List};
use super::{ExpertId, Policy, PolicyShape};

pub(super) const NAME: &str = "s3fifo";

/// Uses are counted up to this (two bits).
const MOST_USES: u8 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    Small,
    Main,
    Ghost,
}

/// See the module.
pub(super) struct S3Fifo {
    links: Links,
    small: List,
    main: List,
    ghost: List,
    place: Vec<Place>,
    /// Uses since the expert entered its queue.
    uses: Vec<u8>,
    /// Share of the small queue, 10 %, and of main and ghost, the rest.
    small_share: usize,
    ghost_limit: usize,
}

impl S3Fifo {
    pub fn new(shape: PolicyShape) -> Self {
        let small_share = (shape.capacity / 10).max(1);
        S3Fifo {
            links: Links::new(shape.ids()),
            small: List::new(),
            main: List::new(),
            ghost: List::new(),
            place: vec![Place::Nowhere; shape.ids()],
            uses: vec![0; shape.ids()],
            small_share,
            ghost_limit: shape.capacity.saturating_sub(small_share).max(1),
        }
    }

    fn enter(&mut self, id: u32, place: Place) {
        let list = match place {
            Place::Small => &mut self.small,
            Place::Main => &mut self.main,
            Place::Ghost => &mut self.ghost,
            Place::Nowhere => return,
        };
        self.links.push_front(list, id);
        self.place[id as usize] = place;
    }

    fn leave(&mut self, id: u32) -> Place {
        let place = std::mem::replace(&mut self.place[id as usize], Place::Nowhere);
        match place {
            Place::Small => self.links.remove(&mut self.small, id),
            Place::Main => self.links.remove(&mut self.main, id),
            Place::Ghost => self.links.remove(&mut self.ghost, id),
            Place::Nowhere => {}
        }
        place
    }

    /// The first of the small queue that was used at most once; the others
    /// move to the main queue.
    fn leaving_small(&mut self, busy: &dyn Fn(ExpertId) -> bool) -> Option<ExpertId> {
        for _ in 0..self.small.len() {
            let id = self.small.back()?;
            let (in_use, uses) = (busy(ExpertId(id)), self.uses[id as usize]);
            if !in_use && uses <= 1 {
                return Some(ExpertId(id));
            }
            self.leave(id);
            if in_use {
                self.enter(id, Place::Small);
            } else {
                self.uses[id as usize] = 0;
                self.enter(id, Place::Main);
            }
        }
        None
    }

    /// The first of the main queue that was not used; the others go round
    /// again with one use less.
    fn leaving_main(&mut self, busy: &dyn Fn(ExpertId) -> bool) -> Option<ExpertId> {
        for _ in 0..self.main.len() * (usize::from(MOST_USES) + 1) {
            let id = self.main.back()?;
            let (in_use, uses) = (busy(ExpertId(id)), &mut self.uses[id as usize]);
            if !in_use && *uses == 0 {
                return Some(ExpertId(id));
            }
            *uses -= u8::from(!in_use);
            self.leave(id);
            self.enter(id, Place::Main);
        }
        None
    }
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        NAME
    }

    fn on_select(&mut self, e: ExpertId, _tokens: u32, _weight: f32) {
        if matches!(self.place[e.0 as usize], Place::Small | Place::Main) {
            let uses = &mut self.uses[e.0 as usize];
            *uses = (*uses + 1).min(MOST_USES);
        }
    }

    fn on_token(&mut self) {}

    fn on_insert(&mut self, e: ExpertId) {
        let place = match self.leave(e.0) {
            Place::Ghost => Place::Main,
            _ => Place::Small,
        };
        self.uses[e.0 as usize] = 0;
        self.enter(e.0, place);
    }

    fn on_remove(&mut self, e: ExpertId) {
        if self.leave(e.0) == Place::Small {
            self.enter(e.0, Place::Ghost);
            if self.ghost.len() > self.ghost_limit {
                self.ghost.back().map(|oldest| self.leave(oldest));
            }
        }
    }

    fn victim(&mut self, _incoming: ExpertId, busy: &dyn Fn(ExpertId) -> bool) -> Option<ExpertId> {
        if self.small.len() >= self.small_share {
            self.leaving_small(busy).or_else(|| self.leaving_main(busy))
        } else {
            self.leaving_main(busy).or_else(|| self.leaving_small(busy))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::shape;
    use super::*;

    fn replace(policy: &mut S3Fifo, incoming: u32) -> Option<u32> {
        let victim = policy.victim(ExpertId(incoming), &|_| false)?;
        policy.on_remove(victim);
        policy.on_insert(ExpertId(incoming));
        Some(victim.0)
    }

    fn full_of_0_to_9() -> S3Fifo {
        let mut policy = S3Fifo::new(shape(1, 100, 10));
        (0..10).for_each(|id| policy.on_insert(ExpertId(id)));
        policy
    }

    #[test]
    fn what_is_used_once_leaves_in_order_of_arrival() {
        let mut policy = full_of_0_to_9();
        let victims: Vec<_> = (20..25).map(|id| replace(&mut policy, id)).collect();
        assert_eq!(victims, [0, 1, 2, 3, 4].map(Some));
    }

    #[test]
    fn what_is_used_twice_moves_to_main_and_outlives_a_scan() {
        let mut policy = full_of_0_to_9();
        for _ in 0..2 {
            policy.on_select(ExpertId(0), 1, 1.0);
        }
        policy.on_select(ExpertId(1), 1, 1.0); // once is not enough
        let victims: Vec<_> = (20..60).filter_map(|id| replace(&mut policy, id)).collect();
        assert!(!victims.contains(&0));
        assert_eq!(victims[0], 1);
    }

    #[test]
    fn who_comes_back_from_the_ghosts_goes_to_main() {
        let mut policy = full_of_0_to_9();
        assert_eq!(replace(&mut policy, 20), Some(0));
        replace(&mut policy, 0);
        let victims: Vec<_> = (30..60).filter_map(|id| replace(&mut policy, id)).collect();
        assert!(!victims.contains(&0));
    }

    #[test]
    fn main_gives_way_in_order_and_uses_buy_one_round_each() {
        // Small holds its one; main holds 0 (used) and 1, both ghosts before.
        let mut policy = S3Fifo::new(shape(1, 100, 30));
        for id in [0, 1] {
            policy.on_insert(ExpertId(id));
            policy.on_remove(ExpertId(id));
            policy.on_insert(ExpertId(id));
        }
        policy.on_select(ExpertId(0), 1, 1.0);
        policy.on_insert(ExpertId(2));
        assert_eq!(replace(&mut policy, 40), Some(1));
        assert_eq!(replace(&mut policy, 41), Some(0));
    }
}
