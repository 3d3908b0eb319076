//! `docs/records.md`, the table of record types, against the code: names, numbers, constants, modules.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use walrider_wal::rmgr::RmgrId;

/// A row of the table.
struct Row {
    rmgr: u8,
    /// `None`: all of them.
    info: Option<u8>,
    name: String,
    constants: Vec<String>,
    module: Option<String>,
    remarks: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn table() -> Vec<Row> {
    let text = fs::read_to_string(root().join("docs/records.md")).unwrap();
    let mut rmgr = None;
    let mut rows = Vec::new();
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            let (number, name) = heading.split_once(' ').unwrap();
            let id = RmgrId(number.parse().unwrap());
            assert_eq!(id.to_string(), name);
            rmgr = Some(id.0);
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", info, name, constants, module, _made_by, remarks, ""] = cells[..] else { continue };
        let info = match info.strip_prefix("0x") {
            Some(digits) => Some(u8::from_str_radix(digits, 16).unwrap()),
            None if info == "any" => None,
            None => continue,
        };
        let code = |cell: &str| cell.strip_prefix('`').and_then(|cell| cell.strip_suffix('`')).map(str::to_owned);
        let constants = constants.split(" + ").filter_map(code).collect();
        let (name, remarks) = (name.to_owned(), remarks.to_owned());
        rows.push(Row { rmgr: rmgr.unwrap(), info, name, constants, module: code(module), remarks });
    }
    rows
}

#[test]
fn the_table_names_every_type_that_the_code_names() {
    let rows = table();
    for number in 0..=u8::MAX {
        let rmgr = RmgrId(number);
        for info in 0..=u8::MAX {
            let bits = if rmgr == RmgrId::XACT { info & 0x70 } else { info & 0xF0 };
            let mut found = rows.iter().filter(|row| row.rmgr == number && row.info.is_none_or(|info| info == bits));
            let stated = found.next().map(|row| row.name.as_str());
            assert!(found.next().is_none(), "{rmgr} {bits:#04X} is there twice");
            assert_eq!(rmgr.get().and_then(|known| (known.identify)(info)), stated, "{rmgr} {info:#04X}");
        }
    }
}

#[test]
fn the_constants_have_the_numbers_of_the_table() {
    let mut declared = HashMap::new();
    for entry in fs::read_dir(root().join("crates/wal/src/records")).unwrap() {
        for line in fs::read_to_string(entry.unwrap().path()).unwrap().lines() {
            let declaration = line.strip_prefix("pub const ").and_then(|line| line.split_once(": u8 = 0x"));
            if let Some((name, value)) = declaration {
                declared.insert(name.to_owned(), u8::from_str_radix(value.trim_end_matches(';'), 16).unwrap());
            }
        }
    }
    for row in table() {
        let sum = row.constants.iter().map(|name| declared[name]).fold(0, |sum, value| sum | value);
        assert_eq!(sum, row.info.unwrap_or(0), "{}", row.name);
    }
}

#[test]
fn the_modules_of_the_table_know_the_types() {
    let mentions = |text: &str, word: &str| {
        text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|other| other == word)
    };
    for row in table() {
        match &row.module {
            Some(module) => {
                let text = fs::read_to_string(root().join("crates").join(module)).expect(module);
                let wanted = row.constants.first();
                assert!(wanted.is_none_or(|name| mentions(&text, name)), "{module} does not know {}", row.name);
            }
            None => assert!(row.remarks.starts_with("No effect") && row.remarks.contains(".c)"), "{}", row.name),
        }
    }
}
