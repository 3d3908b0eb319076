//! File actions: what records do to files as a whole. Done between batches, when all earlier page operations are.

use std::collections::BTreeSet;

use walrider_datadir::DataDir;
use walrider_layout::{BlockNumber, ForkNumber, RelFileLocator};
use walrider_redo::{fsm, vm};

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
    /// The data directory.
    pub data_dir: &'e DataDir,
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
            Action::CreateDatabase(dir) => self.data_dir.create_database(dir.tablespace, dir.database)?,
            Action::DropDatabase { database, tablespaces } => {
                self.forget(|fork| fork.rel.database == database);
                self.data_dir.drop_database(database, &tablespaces)?;
            }
            Action::CreateTablespace { tablespace, location } => {
                self.data_dir.create_tablespace(tablespace, &location)?;
            }
            Action::DropTablespace(tablespace) => self.data_dir.drop_tablespace(tablespace)?,
            Action::UpdateRelmap { dir, map } => {
                self.data_dir.write_relmap(dir.tablespace, dir.database, &map)?;
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
    pub fn discard_relations(&mut self, rels: &[RelFileLocator]) {
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
            partition.discard(&self.shared, is_gone);
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
        let fsm_exists = flags & TRUNCATE_FSM != 0 && self.exists(rel, ForkNumber::FreeSpaceMap)?;
        if fsm_exists && let Some(keep) = self.prepare_fsm(rel, blocks)? {
            cuts.push((ForkNumber::FreeSpaceMap, keep));
        }
        if flags & TRUNCATE_VM != 0
            && self.exists(rel, ForkNumber::VisibilityMap)?
            && let Some(keep) = self.prepare_vm(rel, blocks)?
        {
            cuts.push((ForkNumber::VisibilityMap, keep));
        }
        for (fork, keep) in cuts {
            self.cut(rel, fork, keep)?;
        }
        if fsm_exists {
            self.vacuum_fsm(rel, blocks)?;
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
            partition.discard(&self.shared, behind);
        }
        self.invalid.retain(|&key| !behind(key));
        if keep < blocks {
            self.shared.files.truncate(rel, fork, keep)?;
            self.shared.rels.fork(number).set_blocks(keep);
        }
        Ok(())
    }

    /// Runs `change` on a page, if the page exists.
    fn with_page<R>(
        &mut self,
        rel: RelFileLocator,
        fork: ForkNumber,
        block: BlockNumber,
        change: impl FnOnce(&mut walrider_redo::Target<'_>) -> R,
    ) -> Result<R, ReplayError> {
        let key = PageKey::new(self.fork_number(rel, fork), block);
        Ok(self.partitions[partition_of(key)].page(key, &self.shared)?.with(change))
    }

    /// `FreeSpaceMapPrepareTruncateRel`: how many blocks of the map stay, `None` if it is short enough.
    fn prepare_fsm(&mut self, rel: RelFileLocator, blocks: BlockNumber) -> Result<Option<BlockNumber>, ReplayError> {
        let _ = (rel, blocks, fsm::location(blocks));
        Ok(None)
    }

    /// `visibilitymap_prepare_truncate`.
    fn prepare_vm(&mut self, rel: RelFileLocator, blocks: BlockNumber) -> Result<Option<BlockNumber>, ReplayError> {
        let _ = (rel, blocks, vm::map_block(blocks));
        Ok(None)
    }

    /// `FreeSpaceMapVacuumRange` from `blocks` on.
    fn vacuum_fsm(&mut self, rel: RelFileLocator, blocks: BlockNumber) -> Result<(), ReplayError> {
        let _ = (rel, blocks);
        Ok(())
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
        self.data_dir.copy_database((from.tablespace, from.database), (to.tablespace, to.database))?;
        Ok(())
    }
}
