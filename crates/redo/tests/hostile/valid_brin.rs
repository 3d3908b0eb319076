//! The same of BRIN indexes.

use walrider_layout::bytes::put_u16;
use walrider_layout::page::{ItemId, PageMut};
use walrider_layout::{BLCKSZ, PageBytes};
use walrider_redo::items::add_index_item;
use walrider_wal::records::brin::*;
use walrider_wal::rmgr::RmgrId;

use crate::drive::Case;
use crate::valid::{block, longs, numbers};

/// A regular page with a few tuples; line pointer 2 is unused.
fn regular() -> Box<PageBytes> {
    let mut bytes = Box::new([0; BLCKSZ]);
    let page = &mut PageMut(&mut bytes);
    page.init(8);
    put_u16(page.0, BLCKSZ - 2, 0xF093);
    for (number, len) in (1..).zip([24, 16, 40, 16, 24]) {
        add_index_item(page, &vec![number as u8; len], number).expect("it fits");
    }
    page.set_item_id(2, ItemId::UNUSED);
    bytes
}

/// One case of every kind of change.
pub fn cases() -> Vec<Case> {
    let brin = |name, info, main, blocks| Case { name, rmgr: RmgrId::BRIN, info, main, blocks, page: regular() };
    let insert = |offset| [longs(&[12, 4]), numbers(&[offset])].concat();
    let update = |offset| [numbers(&[4, 0]), insert(offset)].concat();
    let empty = |id| block(id, false, vec![]);
    vec![
        brin(
            "CREATE_INDEX",
            XLOG_BRIN_CREATE_INDEX,
            [longs(&[4]), numbers(&[1])].concat(),
            vec![block(0, true, vec![])],
        ),
        brin("INSERT", XLOG_BRIN_INSERT, insert(2), vec![block(0, false, vec![9; 32]), empty(1)]),
        brin("INSERT+INIT", XLOG_BRIN_INSERT | XLOG_BRIN_INIT_PAGE, insert(1), vec![block(0, true, vec![9; 32])]),
        brin("UPDATE", XLOG_BRIN_UPDATE, update(6), vec![block(0, false, vec![9; 32]), empty(1), empty(2)]),
        brin("UPDATE+INIT", XLOG_BRIN_UPDATE | XLOG_BRIN_INIT_PAGE, update(1), vec![block(0, true, vec![9; 32])]),
        brin("SAMEPAGE_UPDATE", XLOG_BRIN_SAMEPAGE_UPDATE, numbers(&[3]), vec![block(0, false, vec![9; 64])]),
        brin("REVMAP_EXTEND", XLOG_BRIN_REVMAP_EXTEND, longs(&[4]), vec![empty(0), block(1, true, vec![])]),
        brin("DESUMMARIZE", XLOG_BRIN_DESUMMARIZE, [longs(&[4, 12]), numbers(&[5])].concat(), vec![empty(0), empty(1)]),
    ]
}
