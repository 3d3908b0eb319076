//! One WAL record, taken apart: header, block references with their images and data, main data
//! (`access/xlogrecord.h`, `DecodeXLogRecord` in `access/transam/xlogreader.c`, PostgreSQL 18).

use std::ops::{Deref, DerefMut};

use arrayvec::ArrayVec;
use walrider_layout::bytes::{Reader, u32_at, u64_at};
use walrider_layout::wal::RECORD_HEADER_SIZE;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, Lsn, Major, RelFileLocator, TransactionId};

use crate::crc::record_crc;
use crate::rmgr::RmgrId;

/// Highest block reference id (`XLR_MAX_BLOCK_ID`).
pub const MAX_BLOCK_ID: u8 = 32;

/// `xl_info`: the record changes files in ways that no block reference tells.
pub const XLR_SPECIAL_REL_UPDATE: u8 = 0x01;
/// `xl_info`: images are there to check redo's result against (`wal_consistency_checking`).
pub const XLR_CHECK_CONSISTENCY: u8 = 0x02;

pub(crate) const BLOCK_ID_DATA_SHORT: u8 = 255;
pub(crate) const BLOCK_ID_DATA_LONG: u8 = 254;
pub(crate) const BLOCK_ID_ORIGIN: u8 = 253;
pub(crate) const BLOCK_ID_TOPLEVEL_XID: u8 = 252;

/// `fork_flags`: a full-page image follows.
pub(crate) const BKPBLOCK_HAS_IMAGE: u8 = 0x10;
/// `fork_flags`: the relation is that of the reference before.
pub(crate) const BKPBLOCK_SAME_REL: u8 = 0x80;

/// `bimg_info`: the image has a hole.
pub const BKPIMAGE_HAS_HOLE: u8 = 0x01;
/// `bimg_info`: the image is restored during replay (others only serve consistency checks).
pub const BKPIMAGE_APPLY: u8 = 0x02;
/// `bimg_info`: compressed with pglz.
pub const BKPIMAGE_COMPRESS_PGLZ: u8 = 0x04;
/// `bimg_info`: compressed with lz4.
pub const BKPIMAGE_COMPRESS_LZ4: u8 = 0x08;
/// `bimg_info`: compressed with zstd.
pub const BKPIMAGE_COMPRESS_ZSTD: u8 = 0x10;

/// The fixed front of every record (`XLogRecord`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// `xl_tot_len`: bytes of the whole record, header included.
    pub total_len: u32,
    /// `xl_xid`, 0 if the record belongs to no transaction.
    pub xid: TransactionId,
    /// `xl_prev`: where the previous record begins.
    pub prev: Lsn,
    /// `xl_info`: the upper half belongs to the resource manager.
    pub info: u8,
    /// `xl_rmid`.
    pub rmgr: RmgrId,
    /// `xl_crc`: CRC-32C over everything behind the header, then the header without this field.
    pub crc: u32,
}

impl RecordHeader {
    /// Reads the header at the front of `bytes`; `None` if there are fewer than 24 bytes.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Option<RecordHeader> {
        let bytes: &[u8; RECORD_HEADER_SIZE] = bytes.first_chunk()?;
        Some(RecordHeader {
            total_len: u32_at(bytes, 0),
            xid: u32_at(bytes, 4),
            prev: Lsn(u64_at(bytes, 8)),
            info: bytes[16],
            rmgr: RmgrId(bytes[17]),
            crc: u32_at(bytes, 20),
        })
    }

    /// The part of `xl_info` that the resource manager defines (`xl_info & ~XLR_INFO_MASK`).
    #[inline]
    pub fn rmgr_info(&self) -> u8 {
        self.info & 0xF0
    }
}

/// Whether the CRC that a whole record carries is the one of its bytes (`ValidXLogRecord`).
#[inline]
pub fn crc_is_valid(record: &[u8]) -> bool {
    let Some((header, body)) = record.split_first_chunk::<RECORD_HEADER_SIZE>() else { return false };
    record_crc(header, body) == u32_at(header, 20)
}

/// A full-page image in a record, possibly compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Image<'a> {
    /// `bimg_info`: the `BKPIMAGE_…` flags.
    pub info: u8,
    /// Where the hole begins, in bytes from the beginning of the page.
    pub hole_offset: u16,
    /// Bytes of the hole, 0 if there is none.
    pub hole_len: u16,
    /// The stored bytes.
    pub bytes: &'a [u8],
}

impl Image<'_> {
    /// Whether redo restores the page from this image (`BKPIMAGE_APPLY`).
    #[inline]
    pub fn apply(&self) -> bool {
        self.info & BKPIMAGE_APPLY != 0
    }

    /// Whether the stored bytes are compressed (`BKPIMAGE_COMPRESSED`).
    #[inline]
    pub fn is_compressed(&self) -> bool {
        self.info & (BKPIMAGE_COMPRESS_PGLZ | BKPIMAGE_COMPRESS_LZ4 | BKPIMAGE_COMPRESS_ZSTD) != 0
    }
}

/// A reference to one block of a relation, with what the record says about it (`DecodedBkpBlock`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRef<'a> {
    /// Number of the reference within the record.
    pub id: u8,
    /// The relation.
    pub rel: RelFileLocator,
    /// The fork.
    pub fork: ForkNumber,
    /// The block.
    pub block: BlockNumber,
    /// Redo initialises the page from scratch (`BKPBLOCK_WILL_INIT`).
    pub will_init: bool,
    /// The full-page image, if there is one.
    pub image: Option<Image<'a>>,
    /// `BKPBLOCK_HAS_DATA`: there is block data, even if it should be empty.
    pub has_data: bool,
    /// The resource manager's data for this block.
    pub data: &'a [u8],
}

impl BlockRef<'_> {
    /// Whether redo restores the page from an image (`XLogRecBlockImageApply`).
    #[inline]
    pub fn image_applies(&self) -> bool {
        self.image.is_some_and(|image| image.apply())
    }
}

/// The block references of a record, in ascending order of their ids.
///
/// Up to four, which is nearly always, are held in place; room for all 33 would make every record that is moved a copy of
/// two kilobytes.
#[derive(Clone, Debug, PartialEq, Eq)]
// In place is the point; few records have the other variant, and none is stored.
#[allow(clippy::large_enum_variant)]
pub enum BlockRefs<'a> {
    /// Held in place.
    Few(ArrayVec<BlockRef<'a>, 4>),
    /// Allocated.
    Many(Vec<BlockRef<'a>>),
}

impl Default for BlockRefs<'_> {
    fn default() -> Self {
        BlockRefs::Few(ArrayVec::new())
    }
}

impl<'a> BlockRefs<'a> {
    #[inline]
    fn clear(&mut self) {
        match self {
            BlockRefs::Few(few) => few.clear(),
            BlockRefs::Many(_) => *self = BlockRefs::default(),
        }
    }

    #[inline]
    fn push(&mut self, block: BlockRef<'a>) {
        match self {
            BlockRefs::Few(few) => {
                if let Err(error) = few.try_push(block) {
                    let many = few.iter().copied().chain([error.element()]).collect();
                    *self = BlockRefs::Many(many);
                }
            }
            BlockRefs::Many(many) => many.push(block),
        }
    }
}

impl<'a> Deref for BlockRefs<'a> {
    type Target = [BlockRef<'a>];

    #[inline]
    fn deref(&self) -> &[BlockRef<'a>] {
        match self {
            BlockRefs::Few(few) => few,
            BlockRefs::Many(many) => many,
        }
    }
}

impl DerefMut for BlockRefs<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            BlockRefs::Few(few) => few,
            BlockRefs::Many(many) => many,
        }
    }
}

impl<'r, 'a> IntoIterator for &'r BlockRefs<'a> {
    type Item = &'r BlockRef<'a>;
    type IntoIter = std::slice::Iter<'r, BlockRef<'a>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// A record whose framing was checked; the bytes are borrowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// The version that wrote it: some main data differs between majors.
    pub major: Major,
    /// Where the record begins.
    pub lsn: Lsn,
    /// One past its last byte, rounded up to 8: what becomes the LSN of a page that it changes (`EndRecPtr`).
    pub end: Lsn,
    /// The fixed header.
    pub header: RecordHeader,
    /// Replication origin, 0 if none (`record_origin`).
    pub origin: u16,
    /// Top-level transaction of a subtransaction's record, 0 if not stated.
    pub toplevel_xid: TransactionId,
    /// Block references in ascending order of their ids, which may have gaps.
    pub blocks: BlockRefs<'a>,
    /// The data that belongs to no block.
    pub main_data: &'a [u8],
}

/// A record's framing makes no sense although its CRC may be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRecord {
    /// The record ends before what it announces.
    #[error("record is shorter than its headers say")]
    TooShort,
    /// Bytes are left over, or missing, once all announced parts are taken.
    #[error("record length does not agree with the lengths of its parts")]
    LengthMismatch,
    /// Block reference ids must ascend.
    #[error("block reference {0} is out of order")]
    BlockOutOfOrder(u8),
    /// A block or data id that is not defined.
    #[error("undefined block reference {0}")]
    UndefinedBlockId(u8),
    /// A fork number that is not defined.
    #[error("block reference {0} names fork {1}, which does not exist")]
    UndefinedFork(u8, u8),
    /// The flag for block data disagrees with its length.
    #[error("block reference {0} disagrees with itself about its data")]
    DataFlag(u8),
    /// The geometry of an image is impossible.
    #[error("block reference {0} has an impossible full-page image (length {1}, hole at {2} of {3})")]
    Image(u8, u16, u16, u16),
    /// The first block reference cannot refer to an earlier one's relation.
    #[error("block reference {0} refers to the relation of an earlier one, but there is none")]
    NoPreviousRelation(u8),
}

/// Where a block's stored bytes are, before the payload has been reached.
struct Pending {
    image_len: usize,
    data_len: usize,
}

impl<'a> Record<'a> {
    /// A record to be filled by [`Record::read`].
    pub fn empty(major: Major) -> Record<'a> {
        Record {
            major,
            lsn: Lsn::INVALID,
            end: Lsn::INVALID,
            header: RecordHeader { total_len: 0, xid: 0, prev: Lsn::INVALID, info: 0, rmgr: RmgrId(0), crc: 0 },
            origin: 0,
            toplevel_xid: 0,
            blocks: BlockRefs::default(),
            main_data: &[],
        }
    }

    /// Takes apart a whole record. `bytes` is exactly the record (`xl_tot_len` bytes); the CRC is the caller's
    /// business ([`crc_is_valid`]).
    ///
    /// # Errors
    /// What [`InvalidRecord`] lists; any bytes give a record or an error.
    pub fn parse(major: Major, bytes: &'a [u8], lsn: Lsn, end: Lsn) -> Result<Record<'a>, InvalidRecord> {
        let mut record = Record::empty(major);
        record.read(bytes, lsn, end)?;
        Ok(record)
    }

    /// As [`Record::parse`], in place: a record is some hundred bytes long, and to move it about costs as much as to read
    /// it. After an error its contents mean nothing.
    ///
    /// # Errors
    /// As [`Record::parse`].
    pub fn read(&mut self, bytes: &'a [u8], lsn: Lsn, end: Lsn) -> Result<(), InvalidRecord> {
        self.header = RecordHeader::parse(bytes).ok_or(InvalidRecord::TooShort)?;
        if self.header.total_len as usize != bytes.len() {
            return Err(InvalidRecord::LengthMismatch);
        }
        (self.lsn, self.end, self.origin, self.toplevel_xid) = (lsn, end, 0, 0);
        self.blocks.clear();
        let mut pending: ArrayVec<Pending, { MAX_BLOCK_ID as usize + 1 }> = ArrayVec::new();
        let mut reader = Reader::new(&bytes[RECORD_HEADER_SIZE..]);
        let mut payload_len = 0usize;
        let mut main_len = 0usize;
        while reader.rest().len() > payload_len {
            let id = reader.u8().ok_or(InvalidRecord::TooShort)?;
            match id {
                BLOCK_ID_DATA_SHORT | BLOCK_ID_DATA_LONG => {
                    main_len = if id == BLOCK_ID_DATA_SHORT {
                        reader.u8().ok_or(InvalidRecord::TooShort)?.into()
                    } else {
                        reader.u32().ok_or(InvalidRecord::TooShort)? as usize
                    };
                    payload_len += main_len;
                    // By convention the main data header is the last one.
                    break;
                }
                BLOCK_ID_ORIGIN => self.origin = reader.u16().ok_or(InvalidRecord::TooShort)?,
                BLOCK_ID_TOPLEVEL_XID => self.toplevel_xid = reader.u32().ok_or(InvalidRecord::TooShort)?,
                0..=MAX_BLOCK_ID => {
                    let previous = self.blocks.last();
                    if previous.is_some_and(|previous| previous.id >= id) {
                        return Err(InvalidRecord::BlockOutOfOrder(id));
                    }
                    let (block, lens) = parse_block_header(&mut reader, id, previous.map(|previous| previous.rel))?;
                    payload_len += lens.image_len + lens.data_len;
                    self.blocks.push(block);
                    pending.push(lens);
                }
                _ => return Err(InvalidRecord::UndefinedBlockId(id)),
            }
        }
        if reader.rest().len() != payload_len {
            return Err(InvalidRecord::LengthMismatch);
        }
        for (block, lens) in self.blocks.iter_mut().zip(&pending) {
            let image = reader.take(lens.image_len).ok_or(InvalidRecord::TooShort)?;
            if let Some(stored) = &mut block.image {
                stored.bytes = image;
            }
            block.data = reader.take(lens.data_len).ok_or(InvalidRecord::TooShort)?;
        }
        self.main_data = reader.take(main_len).ok_or(InvalidRecord::TooShort)?;
        Ok(())
    }

    /// The block reference with this id (`XLogRecHasBlockRef`, `XLogRecGetBlockTag`).
    #[inline]
    pub fn block(&self, id: u8) -> Option<&BlockRef<'a>> {
        // Nearly always the ids have no gaps.
        match self.blocks.get(usize::from(id)) {
            Some(block) if block.id == id => Some(block),
            _ => self.blocks.iter().find(|block| block.id == id),
        }
    }

    /// The part of `xl_info` that the resource manager defines.
    #[inline]
    pub fn info(&self) -> u8 {
        self.header.rmgr_info()
    }

    /// `xl_xid`.
    #[inline]
    pub fn xid(&self) -> TransactionId {
        self.header.xid
    }
}

/// Reads one block header; the payload slices stay empty until the payload is reached.
fn parse_block_header<'a>(
    reader: &mut Reader<'a>,
    id: u8,
    previous_rel: Option<RelFileLocator>,
) -> Result<(BlockRef<'a>, Pending), InvalidRecord> {
    const FORK_MASK: u8 = 0x0F;
    const HAS_DATA: u8 = 0x20;
    const WILL_INIT: u8 = 0x40;

    let short = InvalidRecord::TooShort;
    let fork_flags = reader.u8().ok_or(short)?;
    let data_len = reader.u16().ok_or(short)?;
    if (fork_flags & HAS_DATA != 0) != (data_len > 0) {
        return Err(InvalidRecord::DataFlag(id));
    }
    let fork_number = fork_flags & FORK_MASK;
    let fork = ForkNumber::from_number(fork_number).ok_or(InvalidRecord::UndefinedFork(id, fork_number))?;
    let mut image_len = 0;
    let mut image = None;
    if fork_flags & BKPBLOCK_HAS_IMAGE != 0 {
        let (stored, len) = parse_image_header(reader, id)?;
        image = Some(stored);
        image_len = len;
    }
    let rel = if fork_flags & BKPBLOCK_SAME_REL != 0 {
        previous_rel.ok_or(InvalidRecord::NoPreviousRelation(id))?
    } else {
        RelFileLocator {
            tablespace: reader.u32().ok_or(short)?,
            database: reader.u32().ok_or(short)?,
            relation: reader.u32().ok_or(short)?,
        }
    };
    let block = BlockRef {
        id,
        rel,
        fork,
        block: reader.u32().ok_or(short)?,
        will_init: fork_flags & WILL_INIT != 0,
        image,
        has_data: fork_flags & HAS_DATA != 0,
        data: &[],
    };
    Ok((block, Pending { image_len, data_len: data_len.into() }))
}

/// Reads the header of a full-page image, and how many bytes are stored.
fn parse_image_header<'a>(reader: &mut Reader<'a>, id: u8) -> Result<(Image<'a>, usize), InvalidRecord> {
    let short = InvalidRecord::TooShort;
    let len = reader.u16().ok_or(short)?;
    let hole_offset = reader.u16().ok_or(short)?;
    let info = reader.u8().ok_or(short)?;
    let mut image = Image { info, hole_offset, hole_len: 0, bytes: &[] };
    let has_hole = info & BKPIMAGE_HAS_HOLE != 0;
    let full = BLCKSZ as u16;
    image.hole_len = match (has_hole, image.is_compressed()) {
        (true, true) => reader.u16().ok_or(short)?,
        (true, false) => full.saturating_sub(len),
        (false, _) => 0,
    };
    let sensible = match (has_hole, image.is_compressed()) {
        (true, compressed) => {
            hole_offset > 0
                && image.hole_len > 0
                && u32::from(hole_offset) + u32::from(image.hole_len) <= BLCKSZ as u32
                && if compressed { len < full } else { len > 0 }
        }
        (false, true) => hole_offset == 0 && len < full,
        (false, false) => hole_offset == 0 && len == full,
    };
    if !sensible {
        return Err(InvalidRecord::Image(id, len, hole_offset, image.hole_len));
    }
    Ok((image, len.into()))
}
