//! Has the system begin to write pages while others are read. What it writes at the end it could have written meanwhile.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use walrider_datadir::relation::RelationFiles;
use walrider_layout::{BlockNumber, ForkNumber, RelFileLocator};

/// Most runs of pages that wait for their turn; what comes then is left to the system.
const MOST_WAITING: usize = 4096;

/// Pages of one segment file that were written, and will hardly be read again.
pub struct Written {
    pub rel: RelFileLocator,
    pub fork: ForkNumber,
    pub first: BlockNumber,
    pub count: BlockNumber,
}

/// The way to a thread that asks the system: it lets those wait who ask for more than it believes a device to take at once.
pub struct Behind(SyncSender<Written>);

impl Behind {
    /// Returns at once. It is a hint: whoever makes files durable later meets what goes wrong.
    pub fn write(&self, written: Written) {
        let _ = self.0.try_send(written);
    }
}

/// Does `work`, with such a thread beside it.
pub fn with_write_behind<R>(files: &RelationFiles, work: impl FnOnce(&Behind) -> R) -> R {
    thread::scope(|scope| {
        let (sender, receiver) = sync_channel(MOST_WAITING);
        // Without it all is as well, if slower.
        let _ = thread::Builder::new().name("write behind".to_owned()).spawn_scoped(scope, || ask(files, receiver));
        work(&Behind(sender))
    })
}

fn ask(files: &RelationFiles, written: Receiver<Written>) {
    for Written { rel, fork, first, count } in written {
        files.write_behind(rel, fork, first, count);
    }
}
