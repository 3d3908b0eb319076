//! What is received, archived: the archiver beside a spool.

use std::sync::Arc;

use walrider_archive::ArchiveError;
use walrider_archive::archiver::{Archiver, ArchiverSettings, Standing};
use walrider_observe::status::{self, Time};
use walrider_spool::{Spool, SpoolOptions};

/// Archives what a spool, opened so, receives.
pub(crate) fn start(
    settings: Option<&ArchiverSettings>,
    options: &SpoolOptions,
    spool: &Arc<Spool>,
) -> Result<Option<Archiver>, ArchiveError> {
    let Some(settings) = settings else { return Ok(None) };
    // It ends with the spool.
    let spool = Arc::downgrade(spool);
    let standing = move || {
        let (timeline, end) = spool.upgrade()?.timeline_and_written();
        Some(Standing { timeline, end })
    };
    Archiver::start(settings.clone(), &options.directory, options.segment_size, Box::new(standing)).map(Some)
}

/// How it stands.
pub(crate) fn status(archiver: Option<&Archiver>) -> status::Archiver {
    let Some(archiver) = archiver else { return status::Archiver::default() };
    let told = archiver.told();
    let (last_archived_wal, last_archived_time) = told.last_archived.unzip();
    let failed = told.last_failed;
    status::Archiver {
        place: Some(archiver.place().to_string()),
        archived_count: told.archived,
        last_archived_wal,
        last_archived_time: last_archived_time.map(Time),
        failed_count: told.failed,
        last_failed_wal: failed.as_ref().map(|(name, ..)| name.clone()),
        last_failed_time: failed.as_ref().map(|&(_, time, _)| Time(time)),
        last_failed_error: failed.map(|(.., error)| error),
        given_up_count: told.given_up,
        ready_count: told.ready,
    }
}
