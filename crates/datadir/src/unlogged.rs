//! Unlogged relations at the end of recovery: as they were made, empty (`ResetUnloggedRelations`, `storage/file/reinit.c`,
//! PostgreSQL 18).

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use walrider_layout::ForkNumber;

use crate::directories::Directories;
use crate::durable::{fsync_dir, fsync_file, list_dir};
use crate::error::{IoContext, Result};

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
    let files: Vec<(&str, RelationFile<'_>)> =
        names.iter().filter_map(|name| Some((name.as_str(), RelationFile::parse(name)?))).collect();
    let is_init = |file: &RelationFile<'_>| file.fork == ForkNumber::Init;
    let unlogged: HashSet<u32> =
        files.iter().filter(|(_, file)| is_init(file)).map(|(_, file)| file.relation).collect();
    if unlogged.is_empty() {
        return Ok(0);
    }
    for (name, file) in &files {
        if !is_init(file) && unlogged.contains(&file.relation) {
            let path = directory.join(name);
            fs::remove_file(&path).context("remove file", &path)?;
        }
    }
    let copies = files.iter().filter(|(_, file)| is_init(file));
    let copies: Vec<_> =
        copies.map(|(name, file)| (name, directory.join(format!("{}{}", file.relation, file.segment)))).collect();
    for (name, copy) in &copies {
        fs::copy(directory.join(name), copy).context("copy to file", copy)?;
    }
    // After all of them are written, so that the disk gets them in one go.
    for (_, copy) in &copies {
        fsync_file(copy)?;
    }
    fsync_dir(directory)?;
    Ok(unlogged.len())
}

/// What the name of a relation's file says.
#[derive(Debug, PartialEq, Eq)]
struct RelationFile<'a> {
    relation: u32,
    fork: ForkNumber,
    /// The end of the name: nothing, or a dot and a number.
    segment: &'a str,
}

impl RelationFile<'_> {
    /// `parse_filename_for_nontemp_relation`: numbers have no leading zeros.
    fn parse(name: &str) -> Option<RelationFile<'_>> {
        let number = |text: &str| text.parse::<u32>().ok().filter(|number| number.to_string() == text && *number > 0);
        let digits = name.find(|c: char| !c.is_ascii_digit()).unwrap_or(name.len());
        let (relation, rest) = name.split_at(digits);
        let (fork, segment) = rest.split_at(rest.find('.').unwrap_or(rest.len()));
        if let Some(text) = segment.strip_prefix('.') {
            number(text)?;
        }
        let fork = ForkNumber::ALL.into_iter().find(|known| known.suffix() == fork)?;
        Some(RelationFile { relation: number(relation)?, fork, segment })
    }
}

#[cfg(test)]
mod tests {
    use walrider_layout::Major;

    use super::*;

    #[test]
    fn names_of_relation_files() {
        let parse = |name| RelationFile::parse(name).map(|file| (file.relation, file.fork, file.segment));
        assert_eq!(parse("16384"), Some((16384, ForkNumber::Main, "")));
        assert_eq!(parse("16384_fsm.2"), Some((16384, ForkNumber::FreeSpaceMap, ".2")));
        assert_eq!(parse("16384_init"), Some((16384, ForkNumber::Init, "")));
        for name in
            ["", "0", "017", "4294967296", "t3_16384", "1_main", "1_x", "1.", "1.0", "1.01", "1.2.3", "1_init_vm"]
        {
            assert_eq!(parse(name), None, "{name}");
        }
    }

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
