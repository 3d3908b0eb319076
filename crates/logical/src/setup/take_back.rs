//! After a failure in the middle: what was made goes again, what cannot be removed is told.

use std::time::Duration;

use walrider_session::{ConnectOptions, Connection};

use super::{Handover, Made, NAME, SESSION, Setup, SetupError};
use crate::sql::{identifier, literal};

/// For each address and command: a server that is gone must not hold up the message.
const PATIENCE: Duration = Duration::from_secs(30);

/// What was removed, and what was not.
#[derive(Default)]
struct Undone {
    removed: Vec<String>,
    left: Vec<String>,
}

impl Undone {
    /// Runs a command; `what` it removes, and by which command a person does it.
    fn remove(&mut self, connection: &mut Option<Connection>, what: &str, command: &str) {
        let done = connection.as_mut().is_some_and(|connection| connection.simple_query(command).is_ok());
        if done {
            self.removed.push(what.to_owned());
        } else {
            self.left.push(format!("{what}: {command}"));
        }
    }
}

impl Setup {
    pub(super) fn take_back(&self, cause: SetupError, made: &Made) -> SetupError {
        if !made.publication && !made.slot && made.copied.is_empty() && made.origins.is_empty() {
            return cause;
        }
        let mut undone = Undone::default();
        let (mut source, mut target) = (connect(&self.settings.source), connect(&self.settings.target));
        if made.unknown {
            if self.has_subscription(&mut target) {
                return SetupError::Done(Box::new(cause));
            }
            // It may come yet: nothing is removed blindly.
            (source, target) = (None, None);
            let look = "first look for the subscription on the target: if it is there, all is done, and nothing is to be removed";
            undone.left.push(look.to_owned());
        }
        if !made.copied.is_empty() {
            // They were empty when we began.
            let tables: Vec<String> = made.copied.iter().map(|table| table.quoted()).collect();
            let what = format!("the rows of {} tables of the target", tables.len());
            undone.remove(&mut target, &what, &format!("TRUNCATE {}", tables.join(", ")));
        }
        if !made.origins.is_empty() {
            let names: Vec<String> = made.origins.iter().map(|name| literal(name)).collect();
            let what = format!("{} replication origins of the target", names.len());
            let command = format!("SELECT pg_replication_origin_drop(n) FROM unnest(ARRAY[{}]) n", names.join(", "));
            undone.remove(&mut target, &what, &command);
        }
        if made.slot {
            let slot = &self.settings.slot;
            // One that still waits for others' transactions would come to be later.
            let command = format!(
                "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots WHERE slot_name = {0} AND active; \
                 SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = {0}",
                literal(slot)
            );
            undone.remove(&mut source, &format!("replication slot {} of the source", identifier(slot)), &command);
        }
        if made.publication {
            let publication = identifier(&self.settings.publication);
            let command = format!("DROP PUBLICATION IF EXISTS {publication}");
            undone.remove(&mut source, &format!("publication {publication} of the source"), &command);
        }
        SetupError::Undone { cause: Box::new(cause), removed: undone.removed, left: undone.left }
    }

    fn has_subscription(&self, target: &mut Option<Connection>) -> bool {
        let Handover::Subscription { name, .. } = &self.settings.handover else { return false };
        let ask = format!(
            "SELECT FROM pg_subscription WHERE subname = {} AND subenabled AND subdbid = \
             (SELECT oid FROM pg_database WHERE datname = current_database())",
            literal(name)
        );
        target.as_mut().is_some_and(|target| target.simple_query(&ask).is_ok_and(|rows| !rows.is_empty()))
    }
}

/// A new session, which no interrupt ends.
fn connect(conninfo: &str) -> Option<Connection> {
    let mut options = ConnectOptions::resolve_ordinary(conninfo, NAME).ok()?;
    options.give_up_after(PATIENCE);
    let mut connection = Connection::open(&options).ok()?;
    connection.set_response_timeout(Some(PATIENCE));
    connection.simple_query(SESSION).ok()?;
    Some(connection)
}
