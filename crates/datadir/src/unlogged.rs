//! Unlogged relations at the end of recovery: as they were made, empty (`ResetUnloggedRelations`, `storage/file/reinit.c`,
//! PostgreSQL 18).

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use walrider_layout::{ForkNumber, Oid};

use crate::directories::Directories;
use crate::durable::{fsync_dir, fsync_file, list_dir};
use crate::error::{IoContext, Result};
use crate::relation::{file_name, parse_file_name};
use crate::sync::{copy_side_by_side, sync_side_by_side};

/// Replaces the forks of every relation that has an init fork with a copy of that. Durable on return; repeatable. Returns
/// how many relations there were.
///
/// # Errors
/// A file that cannot be removed, copied or fsynced.
pub fn reset_unlogged_relations(directories: &Directories) -> Result<usize> {
    directories.databases()?.iter().map(|directory| reset_in(directory)).sum()
}

fn reset_in(directory: &Path) -> Result<usize> {
    let names: Vec<String> =
        list_dir(directory)?.iter().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let files: Vec<_> = names.iter().filter_map(|name| Some((name.as_str(), parse_file_name(name)?))).collect();
    let inits: Vec<_> = files.iter().filter(|(_, (_, fork, _))| *fork == ForkNumber::Init).collect();
    let unlogged: HashSet<Oid> = inits.iter().map(|(_, (relation, ..))| *relation).collect();
    if unlogged.is_empty() {
        return Ok(0);
    }
    for (name, (relation, fork, _)) in &files {
        if *fork != ForkNumber::Init && unlogged.contains(relation) {
            let path = directory.join(name);
            fs::remove_file(&path).context("remove file", &path)?;
        }
    }
    let main = |relation: Oid, segment| directory.join(file_name(relation, ForkNumber::Main, segment));
    let copies = inits.iter().map(|(name, (relation, _, segment))| (directory.join(name), main(*relation, *segment)));
    let copies: Vec<_> = copies.collect();
    copy_side_by_side(&copies)?;
    sync_side_by_side(&copies, |_| (), |(_, copy)| fsync_file(copy))?;
    fsync_dir(directory)?;
    Ok(unlogged.len())
}

#[cfg(test)]
mod tests {
    use walrider_layout::Major;

    use super::*;

    #[test]
    fn only_relations_with_an_init_fork_are_reset() {
        let dir = tempfile::tempdir().unwrap();
        let (base, space) = (dir.path().join("base/5"), dir.path().join("pg_tblspc/20000/PG_18_202506291/5"));
        for directory in [&base, &space] {
            fs::create_dir_all(directory).unwrap();
            for name in ["7", "7.1", "7_fsm", "7_vm", "8", "8_fsm", "t3_7", "PG_VERSION", "9_init.1"] {
                fs::write(directory.join(name), "old").unwrap();
            }
            fs::write(directory.join("7_init"), "init").unwrap();
        }
        let directories = Directories::new(dir.path(), Major::V18, Major::V18.catalog_version());
        for _ in 0..2 {
            assert_eq!(reset_unlogged_relations(&directories).unwrap(), 4);
            for directory in [&base, &space] {
                let names: Vec<_> = list_dir(directory).unwrap().iter().map(|entry| entry.file_name()).collect();
                assert_eq!(names, ["7", "7_init", "8", "8_fsm", "9.1", "9_init.1", "PG_VERSION", "t3_7"]);
                assert_eq!(fs::read_to_string(directory.join("7")).unwrap(), "init");
                assert_eq!(fs::read_to_string(directory.join("8")).unwrap(), "old");
            }
        }
    }
}
