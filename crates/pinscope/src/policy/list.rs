//! Doubly linked lists over expert ids, without allocation: every id is in at
//! most one list of a [`Links`].

const NONE: u32 = u32::MAX;

/// The links of all ids.
#[derive(Debug)]
pub(super) struct Links {
    /// Towards the front.
    newer: Vec<u32>,
    /// Towards the back.
    older: Vec<u32>,
}

/// Both ends of one list.
#[derive(Debug, Clone)]
pub(super) struct List {
    front: u32,
    back: u32,
    len: usize,
}

impl Links {
    /// Links for ids below `ids`, none of them in a list.
    pub fn new(ids: usize) -> Links {
        Links { newer: vec![NONE; ids], older: vec![NONE; ids] }
    }

    /// Puts `id`, which is in no list, at the front of `list`.
    pub fn push_front(&mut self, list: &mut List, id: u32) {
        self.newer[id as usize] = NONE;
        self.older[id as usize] = list.front;
        match list.front {
            NONE => list.back = id,
            front => self.newer[front as usize] = id,
        }
        list.front = id;
        list.len += 1;
    }

    /// Takes `id` out of `list`, which it is in.
    pub fn remove(&mut self, list: &mut List, id: u32) {
        let (newer, older) = (self.newer[id as usize], self.older[id as usize]);
        match newer {
            NONE => list.front = older,
            newer => self.older[newer as usize] = older,
        }
        match older {
            NONE => list.back = newer,
            older => self.newer[older as usize] = newer,
        }
        list.len -= 1;
    }

    /// Ids from the back to the front.
    pub fn oldest_first(&self, list: &List) -> impl Iterator<Item = u32> + '_ {
        let some = |id: u32| (id != NONE).then_some(id);
        std::iter::successors(some(list.back), move |&id| some(self.newer[id as usize]))
    }
}

impl List {
    /// A list of nothing.
    pub fn new() -> List {
        List { front: NONE, back: NONE, len: 0 }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn back(&self) -> Option<u32> {
        (self.back != NONE).then_some(self.back)
    }
}
