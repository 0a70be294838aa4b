//! Gives memory back while other programs need it, also while nobody asks for
//! a token.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use pinscope::pressure::{Advice, Pressure, Reading};

use crate::engine::Shared;

const EVERY: Duration = Duration::from_millis(500);

/// Watches the machine's memory until the engine of `shared` is gone. Without
/// the thread everything works, and nothing is given back.
pub(crate) fn start(shared: &Arc<Shared>) {
    let shared = Arc::downgrade(shared);
    drop(std::thread::Builder::new().name("pressure".into()).spawn(move || watch(&shared)));
}

fn watch(shared: &Weak<Shared>) {
    let mut pressure = Pressure::default();
    loop {
        std::thread::sleep(EVERY);
        let Ok(reading) = Reading::now() else { return };
        let Some(shared) = shared.upgrade() else { return };
        match pressure.judge(reading, Instant::now()) {
            Advice::Stay => {}
            Advice::GiveBack(bytes) => {
                // A reader that is broken says so where experts are asked
                // for; a kernel that refuses will do so again.
                if shared.residency().give_back(bytes).is_err() {
                    return;
                }
            }
            Advice::TakeAgain(bytes) => {
                shared.residency().take_again(bytes);
            }
        }
    }
}
