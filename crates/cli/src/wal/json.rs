//! What `walrider wal … --json` prints.

use crate::failure::SCHEMA_VERSION;
use serde::Serialize;
use walrider_wal::describe::describe;
use walrider_wal::record::{self, BKPIMAGE_COMPRESS_LZ4, BKPIMAGE_COMPRESS_PGLZ, BlockRef};
use walrider_wal::stats::{By, Counts, WalStats, fpi_bytes, type_name};

/// `walrider wal stats`: one object.
#[derive(Serialize)]
pub struct Stats {
    schema_version: u32,
    records: u64,
    /// All of them, images included.
    bytes: u64,
    fpi_bytes: u64,
    start_lsn: Option<String>,
    end_lsn: Option<String>,
    types: Vec<Type>,
}

#[derive(Serialize)]
struct Type {
    rmgr: String,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    count: u64,
    record_bytes: u64,
    fpi_bytes: u64,
    total_bytes: u64,
}

impl Type {
    fn new(rmgr: String, name: Option<String>, counts: &Counts) -> Type {
        let Counts { count, record_bytes, fpi_bytes } = *counts;
        Type { rmgr, name, count, record_bytes, fpi_bytes, total_bytes: counts.total_bytes() }
    }
}

impl Stats {
    /// Resource managers or record types that there are.
    pub fn new(stats: &WalStats, by: By) -> Stats {
        let total = stats.total();
        let present = stats.rmgrs().filter(|(_, counts)| counts.count > 0);
        let types = match by {
            By::Rmgr => present.map(|(rmgr, counts)| Type::new(rmgr.to_string(), None, &counts)).collect(),
            By::Record => {
                let name = |rmgr, info| Some(type_name(rmgr, info).into_owned());
                let types = stats.types();
                types.map(|(rmgr, info, counts)| Type::new(rmgr.to_string(), name(rmgr, info), &counts)).collect()
            }
        };
        Stats {
            schema_version: SCHEMA_VERSION,
            records: total.count,
            bytes: total.total_bytes(),
            fpi_bytes: total.fpi_bytes,
            start_lsn: stats.start.is_valid().then(|| stats.start.to_string()),
            end_lsn: stats.end.is_valid().then(|| stats.end.to_string()),
            types,
        }
    }
}

/// `walrider wal dump`: one object a line.
#[derive(Serialize)]
pub struct Record {
    schema_version: u32,
    lsn: String,
    end_lsn: String,
    prev_lsn: String,
    rmgr: String,
    #[serde(rename = "type")]
    name: String,
    xid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    toplevel_xid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    origin: Option<u16>,
    record_bytes: u64,
    fpi_bytes: u64,
    total_bytes: u64,
    description: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    blocks: Vec<Block>,
}

#[derive(Serialize)]
struct Block {
    id: u8,
    tablespace: u32,
    database: u32,
    relation: u32,
    fork: &'static str,
    block: u32,
    will_init: bool,
    data_bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    image: Option<Image>,
}

#[derive(Serialize)]
struct Image {
    apply: bool,
    bytes: usize,
    hole_offset: u16,
    hole_bytes: u16,
    compression: Option<&'static str>,
}

impl Record {
    /// All that is said about a record.
    pub fn new(record: &record::Record<'_>) -> Record {
        let header = &record.header;
        let fpi_bytes = fpi_bytes(record);
        let total_bytes = u64::from(header.total_len);
        let mut description = String::new();
        describe(record, &mut description);
        Record {
            schema_version: SCHEMA_VERSION,
            lsn: record.lsn.to_string(),
            end_lsn: record.end.to_string(),
            prev_lsn: header.prev.to_string(),
            rmgr: header.rmgr.to_string(),
            name: type_name(header.rmgr, header.info).into_owned(),
            xid: header.xid,
            toplevel_xid: (record.toplevel_xid != 0).then_some(record.toplevel_xid),
            origin: (record.origin != 0).then_some(record.origin),
            record_bytes: total_bytes - fpi_bytes,
            fpi_bytes,
            total_bytes,
            description,
            blocks: record.blocks.iter().map(Block::new).collect(),
        }
    }
}

impl Block {
    fn new(block: &BlockRef<'_>) -> Block {
        Block {
            id: block.id,
            tablespace: block.rel.tablespace,
            database: block.rel.database,
            relation: block.rel.relation,
            fork: block.fork.name(),
            block: block.block,
            will_init: block.will_init,
            data_bytes: block.data.len(),
            image: block.image.as_ref().map(Image::new),
        }
    }
}

impl Image {
    fn new(image: &record::Image<'_>) -> Image {
        let compression = if !image.is_compressed() {
            None
        } else if image.info & BKPIMAGE_COMPRESS_PGLZ != 0 {
            Some("pglz")
        } else if image.info & BKPIMAGE_COMPRESS_LZ4 != 0 {
            Some("lz4")
        } else {
            Some("zstd")
        };
        Image {
            apply: image.apply(),
            bytes: image.bytes.len(),
            hole_offset: image.hole_offset,
            hole_bytes: image.hole_len,
            compression,
        }
    }
}
