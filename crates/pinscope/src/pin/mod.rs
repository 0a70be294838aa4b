//! Pinning for programs that are not ours: pages of a model file are kept in
//! the page cache, where every program that maps the same file finds them.
//!
//! [`Selection`] says which pages (pure), [`LockedRanges`] keeps them, and an
//! [`Advert`] tells a PinScope that runs the same model which experts they are.

mod advert;
mod folder;
mod limit;
mod lock;
mod pages;
mod ranges;

pub use advert::{Advert, AdvertError, Pinned};
pub use limit::{lockable_bytes, HOW_TO_RAISE};
pub use lock::{read_ahead, LockError, LockedRanges};
pub use ranges::{FileRanges, Selection};

/// Size of a page of this machine, bytes.
pub fn page_size() -> u64 {
    // SAFETY: asks for a constant.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}
