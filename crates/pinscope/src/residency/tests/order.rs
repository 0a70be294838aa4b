//! What is handed out when, with a reader whose every completion the test
//! decides.

use std::collections::VecDeque;
use std::sync::Mutex;

use super::*;
use crate::reader::{Busy, ReadClass, ReadRequest};

/// Requests by hand: nothing is done before the test says so.
#[derive(Clone, Default)]
struct ByHand(Arc<Mutex<Hand>>);

#[derive(Default)]
struct Hand {
    queued: Vec<ReadRequest>,
    /// Tags that are done, and not yet reaped.
    due: VecDeque<u64>,
}

impl ByHand {
    /// The reading of a part is over (its bytes are of no interest here).
    fn land(&self, tag: u64) {
        let mut hand = self.0.lock().unwrap();
        let at = hand.queued.iter().position(|r| r.tag == tag).expect("it was asked for");
        hand.queued.remove(at);
        hand.due.push_back(tag);
    }

    fn tags(&self, class: ReadClass) -> Vec<u64> {
        let hand = self.0.lock().unwrap();
        hand.queued.iter().filter(|r| r.class == class).map(|r| r.tag).collect()
    }
}

impl Reader for ByHand {
    fn submit(&mut self, request: ReadRequest) -> Result<(), ReadError> {
        self.0.lock().unwrap().queued.push(request);
        Ok(())
    }

    fn kick(&mut self) {}

    fn reap(&mut self, done: &mut Vec<ReadDone>, block: bool) -> Result<(), ReadError> {
        let mut hand = self.0.lock().unwrap();
        assert!(!block || !hand.due.is_empty(), "this would wait for ever");
        done.extend(hand.due.drain(..).map(|tag| ReadDone { tag, result: Ok(()) }));
        Ok(())
    }

    fn cancel_queued_prefetches(&mut self, done: &mut Vec<ReadDone>) {
        self.0.lock().unwrap().queued.retain(|r| {
            if r.class == ReadClass::Prefetch {
                done.push(ReadDone { tag: r.tag, result: Err(ReadError::Cancelled) });
            }
            r.class == ReadClass::Demand
        });
    }

    fn promote(&mut self, tag: u64) {
        let mut hand = self.0.lock().unwrap();
        let found = hand.queued.iter_mut().find(|r| r.tag == tag);
        found.into_iter().for_each(|r| r.class = ReadClass::Demand);
    }

    fn busy(&self) -> Busy {
        Busy::default()
    }

    fn outstanding(&self) -> usize {
        let hand = self.0.lock().unwrap();
        hand.queued.len() + hand.due.len()
    }

    fn name(&self) -> &'static str {
        "by hand"
    }
}

/// A residency with room for `share` of the experts.
fn by_hand(dir: &Path, share: u64) -> (Residency, ByHand) {
    let (map, _) = model(dir);
    let layout = Layout::new(&map, Layout::full_bytes(&map) * share / 100).unwrap();
    let arena = Arc::new(Arena::new(layout.used() as usize).unwrap());
    let reader = ByHand::default();
    let boxed = Box::new(reader.clone());
    (Residency::with_reader(map, layout, arena, boxed, PolicyKind::default()), reader)
}

fn demand(expert: u32) -> Demand {
    Demand { expert, tokens: 1, weight: 0.5 }
}

fn tag(layer: usize, expert: u32, part: u64) -> u64 {
    u64::from(layer as u32 * EXPERTS + expert) * PARTS_PER_EXPERT + part
}

fn take(r: &mut Residency, in_stages: bool) -> (Stage, Vec<u32>) {
    let mut out = Vec::new();
    let stage = r.take_ready(in_stages, &mut out).unwrap();
    (stage, out)
}

#[test]
fn gate_and_up_are_handed_out_while_down_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let (mut r, reader) = by_hand(dir.path(), 60);
    r.begin(0, 1, &[demand(1), demand(2)]).unwrap();
    [tag(0, 2, 1), tag(0, 2, 0)].into_iter().for_each(|t| reader.land(t));
    assert_eq!(take(&mut r, true), (Stage::First, vec![2]));
    assert!(r.part_ptr(0, 0, 2).is_some() && r.part_ptr(0, 1, 2).is_some());
    assert!(r.part_ptr(0, 2, 2).is_none(), "down is still being read");
    // The other one comes at once.
    [tag(0, 1, 2), tag(0, 1, 0), tag(0, 1, 1)].into_iter().for_each(|t| reader.land(t));
    assert_eq!(take(&mut r, true), (Stage::Whole, vec![1]));
    r.finish(&[1]).unwrap();
    reader.land(tag(0, 2, 2));
    assert_eq!(take(&mut r, true), (Stage::Second, vec![2]));
    r.finish(&[2]).unwrap();
    assert_eq!(take(&mut r, true), (Stage::Whole, vec![]));
}

#[test]
fn who_wants_no_stages_gets_whole_experts() {
    let dir = tempfile::tempdir().unwrap();
    let (mut r, reader) = by_hand(dir.path(), 60);
    r.begin(0, 1, &[demand(1)]).unwrap();
    [0, 1].into_iter().for_each(|part| reader.land(tag(0, 1, part)));
    r.collect(false).unwrap();
    reader.land(tag(0, 1, 2));
    assert_eq!(take(&mut r, false), (Stage::Whole, vec![1]));
}

#[test]
fn a_prefetch_becomes_demand_when_it_is_asked_for_and_the_others_are_taken_back() {
    let dir = tempfile::tempdir().unwrap();
    // Everything fits: prefetches are admitted by the initial guess of idle time.
    let (mut r, reader) = by_hand(dir.path(), 100);
    r.begin(0, 1, &[demand(0)]).unwrap();
    // One by one: two at once would be too many for six slots.
    [3, 4].into_iter().for_each(|e| r.predict(1, &[e]).unwrap());
    (0..3).for_each(|part| reader.land(tag(0, 0, part)));
    assert_eq!(take(&mut r, true), (Stage::Whole, vec![0]));
    assert_eq!(reader.tags(ReadClass::Prefetch).len(), 6, "two experts of three parts");
    r.finish(&[0]).unwrap();
    r.begin(1, 1, &[demand(4), demand(5)]).unwrap();
    assert!(reader.tags(ReadClass::Prefetch).is_empty(), "expert 3 was not wanted");
    let mut wanted = reader.tags(ReadClass::Demand);
    wanted.sort_unstable();
    let parts = |e| (0..3).map(move |part| tag(1, e, part));
    assert_eq!(wanted, parts(4).chain(parts(5)).collect::<Vec<_>>());
    let seen = r.stats().decode.prediction;
    assert_eq!((seen.prefetched, seen.prefetch_used, seen.dropped), (2, 1, 1));
    assert_eq!((seen.missing, seen.missing_right, seen.missing_chosen), (2, 1, 2));
    assert_eq!((seen.chosen, seen.chosen_right), (2, 1));
    // It can be asked for again.
    wanted.into_iter().for_each(|t| reader.land(t));
    assert_eq!(take(&mut r, true).1.len(), 2);
    r.finish(&[4, 5]).unwrap();
    r.begin(2, 1, &[demand(0)]).unwrap();
    (0..3).for_each(|part| reader.land(tag(2, 0, part)));
    assert_eq!(take(&mut r, true), (Stage::Whole, vec![0]));
    r.finish(&[0]).unwrap();
    r.begin(1, 1, &[demand(3)]).unwrap();
    assert_eq!(reader.tags(ReadClass::Demand), parts(3).collect::<Vec<_>>());
}

#[test]
fn bytes_count_when_they_have_landed_and_needed_ones_leave_out_what_was_in_vain() {
    let dir = tempfile::tempdir().unwrap();
    let (mut r, reader) = by_hand(dir.path(), 100);
    r.begin(0, 1, &[demand(0)]).unwrap();
    // One by one: two at once would be too many for six slots.
    [3, 4].into_iter().for_each(|e| r.predict(1, &[e]).unwrap());
    reader.tags(ReadClass::Demand).into_iter().for_each(|t| reader.land(t));
    assert_eq!(take(&mut r, true), (Stage::Whole, vec![0]));
    reader.tags(ReadClass::Prefetch).into_iter().for_each(|t| reader.land(t));
    r.finish(&[0]).unwrap();
    r.begin(1, 1, &[demand(4)]).unwrap();
    let c = r.stats().decode;
    assert_eq!((c.bytes_read, c.bytes_needed), (13_000 + 2 * 19_000, 13_000 + 19_000));
    assert_eq!((c.hits, c.misses), (1, 1), "expert 4 was there in time");
}

#[test]
fn where_arithmetic_waits_prefetches_begin_when_its_reads_have_landed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut r, reader) = by_hand(dir.path(), 100);
    // Nothing to compute until the read is over.
    r.begin(0, 1, &[demand(0)]).unwrap();
    r.predict(1, &[3]).unwrap();
    assert!(reader.tags(ReadClass::Prefetch).is_empty());
    (0..3).for_each(|part| reader.land(tag(0, 0, part)));
    assert_eq!(take(&mut r, true), (Stage::Whole, vec![0]));
    assert_eq!(reader.tags(ReadClass::Prefetch).len(), 3, "the disk would idle now");
    r.finish(&[0]).unwrap();
    (0..3).for_each(|part| reader.land(tag(1, 3, part)));
    r.begin(1, 1, &[demand(3)]).unwrap();
    assert_eq!(take(&mut r, true), (Stage::Whole, vec![3]));
}

#[test]
fn a_prompt_reads_all_that_is_predicted_for_the_next_layer() {
    let dir = tempfile::tempdir().unwrap();
    let (mut r, reader) = by_hand(dir.path(), 100);
    r.begin(0, 8, &[demand(0)]).unwrap();
    r.predict(1, &[0]).unwrap();
    assert_eq!(reader.tags(ReadClass::Prefetch), (0..3).map(|p| tag(1, 0, p)).collect::<Vec<_>>());
}
