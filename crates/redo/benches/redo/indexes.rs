//! Operations on pages of indexes.

use walrider_layout::bytes::{put_u16, put_u32};
use walrider_layout::page::PageMut;
use walrider_layout::{BLCKSZ, PageBytes};
use walrider_redo::items::add_index_item;
use walrider_wal::records::{brin, btree, gin, gist, hash, spgist};
use walrider_wal::rmgr::RmgrId;

use crate::drive::{Case, mark_gin, mark_gist, mark_spgist};
use crate::valid::{block, longs, numbers};

/// An index tuple of so many bytes.
fn tuple(len: usize, key: u16) -> Vec<u8> {
    let mut tuple: Vec<u8> = (0..len).map(|at| at as u8).collect();
    tuple[..8].copy_from_slice(&[numbers(&[0, 7, key]), numbers(&[len as u16])].concat());
    tuple
}

/// A page of so many tuples, each below the one before it.
fn filled(special: usize, count: u16, len: usize) -> Box<PageBytes> {
    let mut bytes = Box::new([0; BLCKSZ]);
    let page = &mut PageMut(&mut bytes);
    page.init(special);
    (1..=count).for_each(|key| add_index_item(page, &tuple(len, key), key).expect("it fits"));
    bytes
}

/// A leaf of a B-tree with a right sibling, as 300 insertions at either side of its middle have left it.
fn leaf() -> Box<PageBytes> {
    let mut bytes = filled(16, 1, 16);
    put_u32(&mut bytes[..], BLCKSZ - 12, 9);
    put_u16(&mut bytes[..], BLCKSZ - 4, 1);
    let page = &mut PageMut(&mut bytes);
    (1..300u16).for_each(|key| add_index_item(page, &tuple(16, key), 2 + key / 2).expect("it fits"));
    bytes
}

fn gist_leaf() -> Box<PageBytes> {
    let mut bytes = filled(16, 140, 48);
    mark_gist(&mut PageMut(&mut bytes), 1);
    bytes
}

fn bucket() -> Box<PageBytes> {
    let mut bytes = filled(16, 300, 16);
    put_u16(&mut bytes[..], BLCKSZ - 4, 0x82);
    put_u16(&mut bytes[..], BLCKSZ - 2, 0xFF80);
    bytes
}

fn gin_entries() -> Box<PageBytes> {
    let mut bytes = filled(8, 250, 24);
    mark_gin(&mut PageMut(&mut bytes), 0, 2);
    bytes
}

/// A posting list of 240 bytes, every item one behind the last; the first is on this block.
fn list(block: u16) -> Vec<u8> {
    [numbers(&[0, block, 1, 230]), vec![1; 230]].concat()
}

/// A leaf of a posting tree with 30 posting lists.
fn posting_leaf() -> Box<PageBytes> {
    let mut bytes = filled(8, 0, 0);
    let lists: Vec<u8> = (0..30).flat_map(list).collect();
    bytes[32..32 + lists.len()].copy_from_slice(&lists);
    put_u16(&mut bytes[..], 12, 32 + lists.len() as u16);
    mark_gin(&mut PageMut(&mut bytes), 0, 1 | 2 | 128);
    bytes
}

/// A leaf tuple of SP-GiST that leads to another.
fn spgist_tuple(next: u16) -> Vec<u8> {
    [longs(&[32 << 2]), numbers(&[next, 0, 9, 1]), vec![7; 20]].concat()
}

fn spgist_leaf() -> Box<PageBytes> {
    let mut bytes = Box::new([0; BLCKSZ]);
    let page = &mut PageMut(&mut bytes);
    page.init(8);
    mark_spgist(page, 4);
    put_u32(page.0, BLCKSZ - 6, 0);
    (1..=180).for_each(|number| add_index_item(page, &spgist_tuple(0), number).expect("it fits"));
    bytes
}

fn brin_regular() -> Box<PageBytes> {
    let mut bytes = filled(8, 200, 24);
    put_u16(&mut bytes[..], BLCKSZ - 2, 0xF093);
    bytes
}

/// The operations.
pub fn cases() -> Vec<Case> {
    let case = |name, rmgr, info, main: Vec<u8>, data, page| {
        let will_init = false;
        Case { name, rmgr, info, main, blocks: vec![block(0, will_init, data)], page }
    };
    let btree = |name, info, main, data| case(name, RmgrId::BTREE, info, main, data, leaf());
    let gin = |name, flags, data, page| case(name, RmgrId::GIN, gin::XLOG_GIN_INSERT, numbers(&[flags]), data, page);
    let gist = |name, main, data| case(name, RmgrId::GIST, gist::XLOG_GIST_PAGE_UPDATE, main, data, gist_leaf());
    let brin = |name, info, main, data| case(name, RmgrId::BRIN, info, main, data, brin_regular());
    let pairs: Vec<u16> = (0..60).flat_map(|at| [2 + 4 * at, 3]).collect();
    let every_third: Vec<u16> = (2..300).step_by(3).collect();
    let removed = every_third.len() as u16;
    // Segment 10 is replaced by one that is longer; all behind it move.
    let longer = [vec![1, 0, 10, 3], numbers(&[0, 10, 1, 236]), vec![1; 236]].concat();
    let right_half = (150..300u16).rev().flat_map(|key| tuple(16, key)).collect();
    let splitting = || [longs(&[0]), numbers(&[150, 160, 0])].concat();
    let split_left = Case {
        blocks: vec![block(0, false, tuple(16, 150)), block(1, true, vec![])],
        ..btree("btree/SPLIT_R, left", btree::XLOG_BTREE_SPLIT_R, splitting(), vec![])
    };
    let split_right = Case {
        blocks: vec![block(0, false, vec![]), block(1, true, right_half)],
        ..btree("btree/SPLIT_R, right", btree::XLOG_BTREE_SPLIT_R, splitting(), vec![])
    };
    vec![
        btree("btree/INSERT_LEAF, middle", btree::XLOG_BTREE_INSERT_LEAF, numbers(&[150]), tuple(16, 400)),
        btree("btree/INSERT_LEAF, end", btree::XLOG_BTREE_INSERT_LEAF, numbers(&[301]), tuple(16, 400)),
        split_left,
        split_right,
        btree("btree/DEDUP", btree::XLOG_BTREE_DEDUP, numbers(&[60]), numbers(&pairs)),
        btree(
            "btree/DELETE 3",
            btree::XLOG_BTREE_DELETE,
            [longs(&[700]), numbers(&[3, 0]), vec![0]].concat(),
            numbers(&[20, 130, 250]),
        ),
        btree("btree/VACUUM 100", btree::XLOG_BTREE_VACUUM, numbers(&[removed, 0]), numbers(&every_third)),
        gin("gin/INSERT, entry", 2, [numbers(&[120, 0]), tuple(24, 400)].concat(), gin_entries()),
        gin("gin/INSERT, posting tree", 1 | 2, longer, posting_leaf()),
        gist("gist/PAGE_UPDATE, one more", numbers(&[0, 1]), tuple(48, 400)),
        gist("gist/PAGE_UPDATE, one for one", numbers(&[1, 1]), [numbers(&[70]), tuple(48, 400)].concat()),
        case("hash/INSERT", RmgrId::HASH, hash::XLOG_HASH_INSERT, numbers(&[150]), tuple(16, 400), bucket()),
        case(
            "hash/VACUUM_ONE_PAGE 100",
            RmgrId::HASH,
            hash::XLOG_HASH_VACUUM_ONE_PAGE,
            [longs(&[740]), numbers(&[removed, 0]), numbers(&every_third)].concat(),
            vec![],
            bucket(),
        ),
        case(
            "spgist/ADD_LEAF",
            RmgrId::SPGIST,
            spgist::XLOG_SPGIST_ADD_LEAF,
            [vec![0, 0], numbers(&[181, 90, 0, 0]), spgist_tuple(0)].concat(),
            vec![],
            spgist_leaf(),
        ),
        brin("brin/SAMEPAGE_UPDATE", brin::XLOG_BRIN_SAMEPAGE_UPDATE, numbers(&[100]), tuple(24, 400)),
        brin("brin/SAMEPAGE_UPDATE, longer", brin::XLOG_BRIN_SAMEPAGE_UPDATE, numbers(&[100]), tuple(40, 400)),
        brin("brin/INSERT", brin::XLOG_BRIN_INSERT, [longs(&[12, 4]), numbers(&[201])].concat(), tuple(24, 400)),
    ]
}
