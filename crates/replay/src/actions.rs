//! File actions: what records do to files as a whole. Done between batches, when all earlier page operations are.

use std::collections::{BTreeSet, HashSet};

use walrider_datadir::directories::{Directories, Missing};
use walrider_datadir::relation::SegmentFile;
use walrider_datadir::relmap;
use walrider_layout::{BlockNumber, ForkNumber, RelFileLocator};
use walrider_redo::{Target, fsm, vm};

use crate::error::ReplayError;
use crate::globals::{Action, DatabaseDir};
use crate::partition::{Partition, Shared, known_blocks};
use crate::plan::partition_of;
use crate::rels::{PageKey, RelFork};

/// `SMGR_TRUNCATE_HEAP` (`catalog/storage_xlog.h`).
const TRUNCATE_HEAP: u32 = 1;
/// `SMGR_TRUNCATE_VM`.
const TRUNCATE_VM: u32 = 2;
/// `SMGR_TRUNCATE_FSM`.
const TRUNCATE_FSM: u32 = 4;

/// What file actions work on.
pub struct Context<'e> {
    /// All pages.
    pub partitions: &'e mut [Partition],
    /// What the partitions share.
    pub shared: Shared<'e>,
    /// Pages that records expected and that were not there.
    pub invalid: &'e mut BTreeSet<PageKey>,
    /// The directories of databases and tablespaces.
    pub directories: &'e Directories,
    /// What to do about a tablespace that is not there.
    pub missing: Missing,
}

impl Context<'_> {
    /// Does one action.
    pub fn execute(&mut self, action: Action) -> Result<(), ReplayError> {
        match action {
            Action::CreateFork { rel, fork } => {
                self.shared.files.create(rel, fork)?;
            }
            Action::DropRelations(rels) => {
                for rel in rels {
                    self.shared.files.unlink(rel)?;
                }
            }
            Action::TruncateRelation { rel, blocks, flags } => self.truncate(rel, blocks, flags)?,
            Action::CopyDatabase { from, to } => self.copy_database(from, to)?,
            Action::CreateDatabase(dir) => {
                self.directories.create_database(dir.tablespace, dir.database, self.missing, self.shared.files)?;
            }
            Action::DropDatabase { database, tablespaces } => {
                // A database that was moved has files, and pages, elsewhere: there they stay.
                let goes = |rel: RelFileLocator| rel.database == database && tablespaces.contains(&rel.tablespace);
                self.forget(|fork| goes(fork.rel));
                // Also of a copy that no record has referred to.
                self.shared.files.forget(|file: &SegmentFile| goes(file.rel));
                let rels = self.shared.rels;
                self.invalid.retain(|key| rels.fork(key.fork()).rel.database != database);
                self.directories.drop_database(database, &tablespaces)?;
            }
            Action::CreateTablespace { tablespace, location } => {
                self.directories.create_tablespace(tablespace, &location)?;
            }
            Action::DropTablespace(tablespace) => {
                self.shared.files.forget(|file| file.rel.tablespace == tablespace);
                self.directories.drop_tablespace(tablespace)?;
            }
            Action::UpdateRelmap { dir, map } => {
                relmap::write(&self.directories.database(dir.tablespace, dir.database), &map)?;
            }
            Action::Checkpoint(_)
            | Action::SwitchTimeline { .. }
            | Action::OverwriteContrecord { .. }
            | Action::ParametersChanged
            | Action::BackupEnded => unreachable!("the engine keeps these for itself"),
        }
        Ok(())
    }

    /// Forgets all pages of relations that are about to be dropped.
    pub fn discard_relations(&mut self, rels: &HashSet<RelFileLocator>) {
        if !rels.is_empty() {
            self.forget(|fork| rels.contains(&fork.rel));
        }
    }

    /// Forgets the pages, lengths, open files and missing pages of the forks that `which` picks.
    fn forget(&mut self, which: impl Fn(&RelFork) -> bool) {
        let mut gone = vec![false; self.shared.rels.len()];
        for number in self.shared.rels.select(&which) {
            gone[number as usize] = true;
            self.shared.rels.fork(number).forget_blocks();
        }
        let is_gone = |key: PageKey| gone[key.fork() as usize];
        for partition in self.partitions.iter_mut() {
            partition.discard(is_gone);
        }
        self.invalid.retain(|&key| !is_gone(key));
        let rels = self.shared.rels;
        self.shared.files.forget(|file| {
            rels.find(file.rel, file.fork).is_some_and(|number| gone.get(number as usize) == Some(&true))
        });
    }

    /// `XLOG_SMGR_TRUNCATE` (`smgr_redo`): cuts the heap and its maps.
    fn truncate(&mut self, rel: RelFileLocator, blocks: BlockNumber, flags: u32) -> Result<(), ReplayError> {
        // Makes the main fork, if it is missing.
        self.blocks(rel, ForkNumber::Main)?;
        let mut cuts = Vec::new();
        if flags & TRUNCATE_HEAP != 0 {
            cuts.push((ForkNumber::Main, blocks));
        }
        // The maps are only touched where they exist (smgrexists).
        let fsm_cut = match flags & TRUNCATE_FSM != 0 && self.exists(rel, ForkNumber::FreeSpaceMap)? {
            true => fsm::prepare_truncate(&mut FsmPages { context: self, rel }, blocks)?,
            false => None,
        };
        cuts.extend(fsm_cut.map(|keep| (ForkNumber::FreeSpaceMap, keep)));
        if flags & TRUNCATE_VM != 0
            && self.exists(rel, ForkNumber::VisibilityMap)?
            && let Some(keep) = self.prepare_vm(rel, blocks)?
        {
            cuts.push((ForkNumber::VisibilityMap, keep));
        }
        for (fork, keep) in cuts {
            self.cut(rel, fork, keep)?;
        }
        if fsm_cut.is_some() {
            let env = self.shared.settings.env;
            fsm::vacuum_range(&mut FsmPages { context: self, rel }, blocks, BlockNumber::MAX, &env)?;
        }
        Ok(())
    }

    fn fork_number(&self, rel: RelFileLocator, fork: ForkNumber) -> u32 {
        self.shared.rels.number(rel, fork)
    }

    /// Length of a fork; its file is made if it is missing.
    fn blocks(&self, rel: RelFileLocator, fork: ForkNumber) -> Result<BlockNumber, ReplayError> {
        known_blocks(&self.shared.rels.fork(self.fork_number(rel, fork)), self.shared.files)
    }

    /// Whether a fork has a file; nothing is made.
    fn exists(&self, rel: RelFileLocator, fork: ForkNumber) -> Result<bool, ReplayError> {
        Ok(self.shared.files.blocks(rel, fork)?.is_some())
    }

    /// Cuts a fork and forgets the pages behind.
    fn cut(&mut self, rel: RelFileLocator, fork: ForkNumber, keep: BlockNumber) -> Result<(), ReplayError> {
        let number = self.fork_number(rel, fork);
        let blocks = self.blocks(rel, fork)?;
        let behind = |key: PageKey| key.fork() == number && key.block() >= keep;
        for partition in self.partitions.iter_mut() {
            partition.discard(behind);
        }
        self.invalid.retain(|&key| !behind(key));
        self.shared.files.truncate(rel, fork, keep)?;
        if keep < blocks {
            self.shared.rels.fork(number).set_blocks(keep);
        }
        Ok(())
    }

    /// Lets `change` have a page; `None` if it does not exist.
    fn with_page<R>(
        &mut self,
        rel: RelFileLocator,
        fork: ForkNumber,
        block: BlockNumber,
        change: impl FnOnce(&mut Target<'_>) -> R,
    ) -> Result<Option<R>, ReplayError> {
        if block >= self.blocks(rel, fork)? {
            return Ok(None);
        }
        let key = PageKey::new(self.fork_number(rel, fork), block);
        self.partitions[partition_of(key)].with_page(key, &self.shared, change).map(Some)
    }

    /// `visibilitymap_prepare_truncate`: clears the bits behind the heap's new end. How many blocks of the map stay;
    /// `None` if it has no more.
    fn prepare_vm(&mut self, rel: RelFileLocator, blocks: BlockNumber) -> Result<Option<BlockNumber>, ReplayError> {
        let fork = ForkNumber::VisibilityMap;
        if let Some(tail) = vm::tail_block(blocks)
            && self.with_page(rel, fork, tail, |target| vm::truncate_tail(target, blocks))?.is_none()
        {
            return Ok(None);
        }
        let keep = vm::blocks_kept(blocks);
        Ok((self.blocks(rel, fork)? > keep).then_some(keep))
    }

    /// `XLOG_DBASE_CREATE_FILE_COPY`: every page of the source goes to its file first (`FlushDatabaseBuffers`).
    fn copy_database(&mut self, from: DatabaseDir, to: DatabaseDir) -> Result<(), ReplayError> {
        let rels = self.shared.rels;
        let of_source = |key: PageKey| {
            let rel = rels.fork(key.fork()).rel;
            rel.database == from.database && rel.tablespace == from.tablespace
        };
        for partition in self.partitions.iter_mut() {
            partition.write_back(&self.shared, of_source)?;
        }
        self.forget(|fork| fork.rel.database == to.database && fork.rel.tablespace == to.tablespace);
        self.shared.files.forget(|file| file.rel.database == to.database && file.rel.tablespace == to.tablespace);
        let (from, to) = ((from.tablespace, from.database), (to.tablespace, to.database));
        Ok(self.directories.copy_database(from, to, self.missing, self.shared.files)?)
    }
}

/// The free space map of one relation.
struct FsmPages<'c, 'e> {
    context: &'c mut Context<'e>,
    rel: RelFileLocator,
}

impl fsm::FsmFork for FsmPages<'_, '_> {
    type Error = ReplayError;

    fn blocks(&mut self) -> Result<BlockNumber, ReplayError> {
        match self.context.exists(self.rel, ForkNumber::FreeSpaceMap)? {
            true => self.context.blocks(self.rel, ForkNumber::FreeSpaceMap),
            false => Ok(0),
        }
    }

    fn page<R>(
        &mut self,
        block: BlockNumber,
        change: impl FnOnce(&mut Target<'_>) -> R,
    ) -> Result<Option<R>, ReplayError> {
        self.context.with_page(self.rel, ForkNumber::FreeSpaceMap, block, change)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use walrider_datadir::relation::{RelationFiles, SegmentFile};
    use walrider_layout::{DEFAULT_TABLESPACE_OID, Major, Oid};
    use walrider_redo::Env;

    use super::*;
    use crate::partition::PageSettings;
    use crate::rels::RelTable;

    /// No record refers to what the copy of a database has. Its files stayed open when it was dropped, with the room that they
    /// took on the disk, and were still to be made durable. Where a database was moved, only its old place is dropped.
    #[test]
    fn a_dropped_database_leaves_nothing_of_a_copy_open_or_to_be_synced() {
        const SPACE: Oid = 20_000;
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("base/5")).unwrap();
        fs::create_dir(dir.path().join("pg_tblspc")).unwrap();
        fs::write(dir.path().join("base/5/1259"), b"page").unwrap();
        let (major, version) = (Major::V18, Major::V18.catalog_version());
        let directories = Directories::new(dir.path(), major, version);
        directories.create_tablespace(SPACE, b"").unwrap();
        let version_dir = walrider_datadir::directories::version_dir(major, version);
        let files = RelationFiles::new(dir.path(), &version_dir, false);
        let settings =
            PageSettings { env: Env { major, hint_bits_are_logged: false }, checksums: false, verify_images: false };
        let (rels, mut invalid) = (RelTable::default(), BTreeSet::new());
        let mut context = Context {
            partitions: &mut [],
            shared: Shared { rels: &rels, files: &files, settings },
            invalid: &mut invalid,
            directories: &directories,
            missing: Missing::Refuse,
        };
        let place = |tablespace, database| DatabaseDir { tablespace, database };
        let copy = |from, to| Action::CopyDatabase { from, to };
        let file = |tablespace, database| SegmentFile {
            rel: RelFileLocator { tablespace, database, relation: 1259 },
            fork: ForkNumber::Main,
            segment: 0,
        };
        let template = place(DEFAULT_TABLESPACE_OID, 5);
        context.execute(copy(template, place(DEFAULT_TABLESPACE_OID, 7))).unwrap();
        context.execute(copy(place(DEFAULT_TABLESPACE_OID, 7), place(SPACE, 7))).unwrap();
        files.sync(file(DEFAULT_TABLESPACE_OID, 7)).unwrap();
        // What records did refer to, where the database is now.
        let moved = rels.number(file(SPACE, 7).rel, ForkNumber::Main);
        rels.fork(moved).set_blocks(3);
        context.execute(Action::DropDatabase { database: 7, tablespaces: vec![DEFAULT_TABLESPACE_OID] }).unwrap();
        let read = files.read(file(DEFAULT_TABLESPACE_OID, 7).rel, ForkNumber::Main, 0, &mut []);
        assert!(read.unwrap_err().to_string().contains("does not exist"));
        assert_eq!(files.take_unsynced(), [file(SPACE, 7)]);
        assert_eq!(rels.fork(moved).file_blocks(), Some(3), "its pages were thrown away, which nobody had written");
    }
}
