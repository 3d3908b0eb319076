//! For tests: builds WAL records by hand, as `XLogRecordAssemble` (`access/transam/xloginsert.c`) lays them out.
//!
//! What it builds need not make sense; only the lengths of its parts agree with what its headers say.

pub mod pages;

use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, Lsn, Major, PageBytes, RelFileLocator, TransactionId};

use crate::crc::record_crc;
use crate::record::{
    BKPIMAGE_APPLY, BKPIMAGE_COMPRESS_LZ4, BKPIMAGE_COMPRESS_PGLZ, BKPIMAGE_COMPRESS_ZSTD, BKPIMAGE_HAS_HOLE, Record,
};
use crate::rmgr::RmgrId;

/// A relation for tests that need only one.
pub const TEST_REL: RelFileLocator = RelFileLocator { tablespace: 1663, database: 5, relation: 16384 };

struct Image {
    info: u8,
    hole_offset: u16,
    hole_len: u16,
    bytes: Vec<u8>,
}

struct Block {
    id: u8,
    rel: RelFileLocator,
    fork: ForkNumber,
    block: BlockNumber,
    will_init: bool,
    image: Option<Image>,
    data: Vec<u8>,
}

/// Builds one record.
///
/// ```
/// use walrider_layout::{ForkNumber, Lsn};
/// use walrider_wal::rmgr::RmgrId;
/// use walrider_wal::testing::{RecordBuilder, TEST_REL};
/// let bytes = RecordBuilder::new(RmgrId::HEAP, 0x10)
///     .xid(740)
///     .main_data([1, 2, 3])
///     .block(0, TEST_REL, ForkNumber::Main, 7)
///     .data(b"tuple")
///     .build();
/// assert!(walrider_wal::record::crc_is_valid(&bytes));
/// let record = RecordBuilder::parse(&bytes, Lsn(0x100_0028));
/// assert_eq!(record.main_data, [1, 2, 3]);
/// assert_eq!(record.block(0).unwrap().data, b"tuple");
/// ```
pub struct RecordBuilder {
    rmgr: RmgrId,
    info: u8,
    xid: TransactionId,
    prev: Lsn,
    origin: Option<u16>,
    toplevel_xid: Option<TransactionId>,
    blocks: Vec<Block>,
    main: Vec<u8>,
}

impl RecordBuilder {
    /// An empty record of this type.
    pub fn new(rmgr: RmgrId, info: u8) -> RecordBuilder {
        RecordBuilder {
            rmgr,
            info,
            xid: 0,
            prev: Lsn(0),
            origin: None,
            toplevel_xid: None,
            blocks: Vec::new(),
            main: Vec::new(),
        }
    }

    /// Sets `xl_xid`.
    pub fn xid(mut self, xid: TransactionId) -> RecordBuilder {
        self.xid = xid;
        self
    }

    /// Sets `xl_prev`.
    pub fn prev(mut self, prev: Lsn) -> RecordBuilder {
        self.prev = prev;
        self
    }

    /// Sets the replication origin.
    pub fn origin(mut self, origin: u16) -> RecordBuilder {
        self.origin = Some(origin);
        self
    }

    /// Sets the top-level transaction.
    pub fn toplevel_xid(mut self, xid: TransactionId) -> RecordBuilder {
        self.toplevel_xid = Some(xid);
        self
    }

    /// Appends to the main data (`XLogRegisterData`).
    pub fn main_data(mut self, bytes: impl AsRef<[u8]>) -> RecordBuilder {
        self.main.extend_from_slice(bytes.as_ref());
        self
    }

    /// Adds a block reference (`XLogRegisterBuffer`); [`Self::will_init`], [`Self::data`] and the images then belong
    /// to it.
    pub fn block(mut self, id: u8, rel: RelFileLocator, fork: ForkNumber, block: BlockNumber) -> RecordBuilder {
        self.blocks.push(Block { id, rel, fork, block, will_init: false, image: None, data: Vec::new() });
        self
    }

    fn last(&mut self) -> &mut Block {
        self.blocks.last_mut().expect("a block reference was added")
    }

    /// Redo initialises the block last added.
    pub fn will_init(mut self) -> RecordBuilder {
        self.last().will_init = true;
        self
    }

    /// Appends to the data of the block last added (`XLogRegisterBufData`).
    pub fn data(mut self, bytes: impl AsRef<[u8]>) -> RecordBuilder {
        self.last().data.extend_from_slice(bytes.as_ref());
        self
    }

    /// Gives the block last added an image of these stored bytes; `info` are the `BKPIMAGE_…` flags.
    pub fn image(mut self, info: u8, hole_offset: u16, hole_len: u16, bytes: impl AsRef<[u8]>) -> RecordBuilder {
        self.last().image = Some(Image { info, hole_offset, hole_len, bytes: bytes.as_ref().to_vec() });
        self
    }

    /// Gives the block last added an image that redo restores, uncompressed and without a hole.
    pub fn full_image(self, page: &PageBytes) -> RecordBuilder {
        self.image(BKPIMAGE_APPLY, 0, 0, page)
    }

    /// Gives the block last added an image that redo restores, uncompressed, without the bytes of the hole.
    pub fn image_with_hole(self, page: &PageBytes, hole_offset: usize, hole_len: usize) -> RecordBuilder {
        assert!(hole_offset + hole_len <= BLCKSZ);
        let stored = [&page[..hole_offset], &page[hole_offset + hole_len..]].concat();
        self.image(BKPIMAGE_APPLY | BKPIMAGE_HAS_HOLE, hole_offset as u16, hole_len as u16, stored)
    }

    /// The record's bytes, CRC included.
    pub fn build(&self) -> Vec<u8> {
        let mut record = vec![0; 24];
        let mut previous = None;
        for block in &self.blocks {
            let same_rel = previous == Some(block.rel);
            previous = Some(block.rel);
            record.push(block.id);
            record.push(
                block.fork as u8
                    | u8::from(block.image.is_some()) << 4
                    | u8::from(!block.data.is_empty()) << 5
                    | u8::from(block.will_init) << 6
                    | u8::from(same_rel) << 7,
            );
            record.extend((block.data.len() as u16).to_le_bytes());
            if let Some(image) = &block.image {
                record.extend((image.bytes.len() as u16).to_le_bytes());
                record.extend(image.hole_offset.to_le_bytes());
                record.push(image.info);
                let compressed = BKPIMAGE_COMPRESS_PGLZ | BKPIMAGE_COMPRESS_LZ4 | BKPIMAGE_COMPRESS_ZSTD;
                if image.info & BKPIMAGE_HAS_HOLE != 0 && image.info & compressed != 0 {
                    record.extend(image.hole_len.to_le_bytes());
                }
            }
            if !same_rel {
                record.extend(block.rel.tablespace.to_le_bytes());
                record.extend(block.rel.database.to_le_bytes());
                record.extend(block.rel.relation.to_le_bytes());
            }
            record.extend(block.block.to_le_bytes());
        }
        if let Some(origin) = self.origin {
            record.push(253);
            record.extend(origin.to_le_bytes());
        }
        if let Some(xid) = self.toplevel_xid {
            record.push(252);
            record.extend(xid.to_le_bytes());
        }
        match self.main.len() {
            0 => {}
            len @ 1..=255 => record.extend([255, len as u8]),
            len => {
                record.push(254);
                record.extend((len as u32).to_le_bytes());
            }
        }
        for block in &self.blocks {
            if let Some(image) = &block.image {
                record.extend(&image.bytes);
            }
            record.extend(&block.data);
        }
        record.extend(&self.main);

        let total_len = record.len() as u32;
        record[0..4].copy_from_slice(&total_len.to_le_bytes());
        record[4..8].copy_from_slice(&self.xid.to_le_bytes());
        record[8..16].copy_from_slice(&self.prev.0.to_le_bytes());
        record[16] = self.info;
        record[17] = self.rmgr.0;
        let (header, body) = record.split_first_chunk().expect("begins with a header");
        let crc = record_crc(header, body);
        record[20..24].copy_from_slice(&crc.to_le_bytes());
        record
    }

    /// Takes apart what [`Self::build`] made, as a record that begins at `lsn`, and on one WAL page. Panics where it
    /// is no record. It is of PostgreSQL 18.
    pub fn parse(bytes: &[u8], lsn: Lsn) -> Record<'_> {
        Self::parse_as(Major::V18, bytes, lsn)
    }

    /// As [`Self::parse`], of another major.
    pub fn parse_as(major: Major, bytes: &[u8], lsn: Lsn) -> Record<'_> {
        let end = Lsn((lsn.0 + bytes.len() as u64).next_multiple_of(8));
        Record::parse(major, bytes, lsn, end).expect("the builder makes a record")
    }
}
